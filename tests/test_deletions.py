"""Every deletion in the package, with the reason why it cannot remove a file of a user.

CONTRIBUTING has the rule. This test finds the calls that delete or replace files; a new one fails until its
reason stands here.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
_DELETES = {
    "rmtree",
    "unlink",
    "rmdir",
    "removedirs",
    "rename",
    "renames",
    "truncate",
    "ftruncate",
    "rm",
    "move",
}
_REQUESTS = {"rm_file", "delete_object"}  # names of methods, which are called by name
_MAY_DELETE = {"remove", "replace", "remove_folder", "commit_folder", "remove_if", "delete"}

TEMPORARY = "a path that this call made, with a random name or in its own temporary folder"
PROCESS = "a name of `temporary_path` or `temporary_name` whose process has ended"
FINAL = "renames its own temporary file to the path that the user named for it"
OWNER = "a folder with its own name and the owner file of that name"
CHECKPOINT = "files with the names that a run gives, in step-N of RUN/checkpoints, which this run has locked"
COPY = "the copy of a checkpoint in the scratch folder of a run's URL, which is named by a digest"
SHARDS = (
    "shards and indexes of a source that this process has claimed, which `check_own` has read if unlisted"
)
NAMED = "a name that the package gives to a file of a dataset directory, for a source whose name was checked"
LAYER = "the three files of a layer, in a folder of its checked name; `_check_own` has read whose they are"
CLAIM = "a claim or a lock, by its content"
CACHE = "a file with its own name in a folder of a cache that is named by a sha256"
EMPTY = "an empty folder that the package made"
STORE = "what its caller names"

REASONS = {
    "programs/annotate/images.py scan": PROCESS,
    "programs/query/verb_query.py _write_parquet": TEMPORARY,
    "engine/checkpoint/bucket.py _pull": COPY,
    "engine/checkpoint/bucket.py close": "the scratch folder of a run's URL, whose files are in the bucket",
    "engine/checkpoint/bucket.py download": COPY,
    "engine/checkpoint/bucket.py proved": COPY,
    "engine/checkpoint/bucket.py remove": CHECKPOINT,
    "engine/checkpoint/bucket.py set_aside": "the manifest of a damaged checkpoint, which has another name by then",
    "engine/checkpoint/bucket.py sweep": CHECKPOINT,
    "engine/checkpoint/checkpoints.py _rotate": CHECKPOINT,
    "engine/checkpoint/folder.py remove": CHECKPOINT,
    "engine/weights.py find_weights": TEMPORARY,
    "engine/ranks/agreement.py check_shared_folder": TEMPORARY,
    "engine/watch/watchdog.py __exit__": "the heartbeat and the empty file of stacks that this process made",
    "programs/export/coco.py finish": TEMPORARY,
    "programs/export/export.py export": "a part that the record of the export lists; only with --overwrite",
    "programs/export/export_part.py remove": "a part that the record of the export lists; only with --overwrite",
    "programs/export/export_format.py __exit__": TEMPORARY,
    "programs/export/export_format.py _link": TEMPORARY,
    "programs/export/export_format.py commit": "a file of a part; those of others were refused before",
    "programs/export/export_format.py remove_temporary": PROCESS,
    "ingest/start_checks.py release_options": NAMED,
    "ingest/finish.py drop_source": NAMED,
    "ingest/finish.py remove_rows": NAMED,
    "ingest/finish.py remove_shards": SHARDS,
    "ingest/finish.py finish": "lists with the names that `record_expected` gives",
    "ingest/ingest.py ingest_wanted": NAMED,
    "recipes/conversion.py convert": "a file of an earlier conversion to this folder, which has no others; only with --overwrite",
    "sam/embedding_cache.py _write": TEMPORARY,
    "shards/layer_writer.py remove_annotated": "files with the names of `sa1b annotate`, in the hidden folder that it made",
    "shards/commit.py _remove_dataset": "dataset.json after its last source; that of another program was refused",
    "shards/commit.py _remove_tables": "tables with the name that `TableFacts` gives, by a digest, and the form of a table",
    "shards/commit.py _withdraw": NAMED,
    "shards/commit.py commit_quarantine": "files with the names that `Quarantine` gives",
    "shards/commit.py commit_task": SHARDS,
    "shards/commit.py join_tables": TEMPORARY,
    "shards/commit.py remove_quarantine": "files with the names that `Quarantine` gives",
    "shards/layer_writer.py _remove": LAYER,
    "shards/layer_writer.py _commit": LAYER,
    "shards/layer_writer.py writing": f"{TEMPORARY}, then its folder if it is empty",
    "shards/staging.py _remove": OWNER,
    "shards/staging.py _remove_unfinished": OWNER,
    "shards/staging.py remove_local_leftovers": PROCESS,
    "shards/staging.py remove_staging": EMPTY,
    "sources/pairing.py take": "a file that `put` wrote to a staging folder",
    "storage/atomic.py commit": FINAL,
    "storage/atomic.py write_whole": TEMPORARY,
    "storage/bucket.py commit_file": "a staged file of its caller, after its upload",
    "storage/bucket.py commit_folder": "a staged folder of its caller, after its upload",
    "storage/bucket.py files": TEMPORARY,
    "storage/bucket.py remove": STORE,
    "storage/bucket.py remove_folder": STORE,
    "storage/bucket.py remove_if": STORE,
    "storage/bucket.py remove_temporary": PROCESS,
    "storage/bucket_requests.py age": TEMPORARY,
    "storage/cache.py _fill": CACHE,
    "storage/cache.py _sweep": CACHE,
    "storage/claim.py _remove": CLAIM,
    "storage/bucket_requests.py _check_conditions": TEMPORARY,
    "storage/bucket_requests.py _remove_stale": CLAIM,
    "storage/bucket_requests.py _swap_locked": CLAIM,
    "storage/range_cache.py _file": CACHE,
    "storage/range_cache.py _is_sparse": TEMPORARY,
    "storage/range_cache.py _remove_others": "files of its own name pattern",
    "storage/objects.py delete": STORE,
    "storage/store.py commit": "moves a staged file to the name that its caller gives",
    "storage/store.py commit_folder": "moves a staged folder to the name that its caller gives",
    "storage/store.py now": TEMPORARY,
    "storage/store.py put_if_absent": TEMPORARY,
    "storage/store.py remove": STORE,
    "storage/store.py remove_folder": STORE,
    "storage/store.py remove_if": STORE,
    "storage/store.py replace_if": STORE,
    "stream/worker_memory.py _end_with": "folder that multiprocessing has made in this process",
    "stream/worker_memory.py mapped": "memory that has no name, which is made larger",
    "stream/columns.py _convert": CACHE,
    "stream/columns.py _remove": TEMPORARY,
    "programs/transfer/dataset_copy.py _finish": NAMED,
    "programs/transfer/dataset_copy.py _object": TEMPORARY,
    "programs/transfer/dataset_copy.py _quarantine": "files with the names that `Quarantine` gives",
    "verify/recover.py rebuild_index": TEMPORARY,
    "verify/rebuild.py _rebuild": TEMPORARY,
    "verify/recover.py restore_names": TEMPORARY,
    "verify/rebuild.py _write_tables": "the record that this run wrote",
    "verify/rebuild.py rebuild_root": "the record that this run wrote",
    "views/view.py write_view": PROCESS,
    "storage/atomic.py add_all": "its own record, whose first line was checked",
    "storage/atomic.py remove": "its own record, whose first line was checked",
    "verify/verify.py verify": "its own record, whose first line was checked",
}


def sites() -> Iterator[tuple[str, str]]:
    """Module and function of each call that may delete a file, and the call as text."""
    for path in sorted((REPOSITORY / "sa1b").rglob("*.py")):
        module = path.relative_to(REPOSITORY / "sa1b").as_posix()
        waiting: list[tuple[ast.AST, str]] = [(ast.parse(path.read_text()), "")]
        while waiting:
            node, function = waiting.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function = node.name
            if _deletes(node):
                yield f"{module} {function}", ast.unparse(node)
            waiting += [(child, function) for child in ast.iter_child_nodes(node)]


def _deletes(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=of, attr="replace"), args=args, keywords=keywords):
            # Not that of texts, times, dates and dataclasses.
            return ast.unparse(of) == "os" or (len(args) == 1 and not keywords)
        case ast.Call(func=ast.Attribute(value=of, attr=name), args=args):
            is_named = name in _DELETES or (name in _MAY_DELETE and ast.unparse(of) != "np")
            return is_named or any(map(_names_deletion, args))  # passed on, or called by its name
        case ast.Call(args=args):
            return any(map(_names_deletion, args))
    return False


def _names_deletion(argument: ast.expr) -> bool:
    match argument:
        case ast.Attribute(value=ast.Name("os" | "shutil"), attr=name):
            return name in _DELETES or name in _MAY_DELETE
        case ast.Constant(value=str(name)):
            return name in _REQUESTS
    return False


def test_every_deletion_has_a_reason() -> None:
    found: dict[str, list[str]] = {}
    for site, call in sites():
        found.setdefault(site, []).append(call)
    assert {site: calls for site, calls in found.items() if site not in REASONS} == {}
    assert REASONS.keys() - found.keys() == set()


def test_the_rule_is_written_down() -> None:
    assert "**A deletion names what it deletes.**" in (REPOSITORY / "CONTRIBUTING.md").read_text()

"""Stream batches from an object store; every read is verified and retried until a deadline.

    aws s3 sync shards s3://bucket/shards
    python examples/stream_from_s3.py s3://bucket/shards
    python examples/stream_from_s3.py s3://bucket/shards --endpoint http://127.0.0.1:9000    # MinIO, Ceph

Credentials come from the environment, ~/.aws or the machine's role; --anonymous uses none.
"""

import argparse

import sa1b
from sa1b.console import reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="URL of a copy of the folder that sa1b reshard made")
    parser.add_argument("--endpoint", help="URL of a store other than Amazon's")
    parser.add_argument("--anonymous", action="store_true", help="send no credentials")
    parser.add_argument("--batch", type=int, default=4, help="images of a step over all ranks")
    parser.add_argument("--image-size", type=int, default=1024, help="pixels of the padded square")
    parser.add_argument("--steps", type=int, default=5, help="number of steps")
    parser.add_argument("--prefetch", type=int, default=8, help="batches in flight: more for a distant store")
    parser.add_argument("--deadline", type=float, default=300, help="seconds for a read with all attempts")
    args = parser.parse_args()

    options = {"anon": True} if args.anonymous else {}
    if args.endpoint:
        options["endpoint_url"] = args.endpoint
    stream = sa1b.Stream(
        args.url,
        storage_options=options,
        deadline=args.deadline,
        global_batch=args.batch,
        image_size=args.image_size,
        block_size=1,  # 16: one request reads 16 neighbours, which stay together
    )
    loader = sa1b.Loader(stream, prefetch=args.prefetch, dense=args.image_size // 4)
    for step, batch in enumerate(loader, 1):
        print(f"step {step}: images {batch.ids.tolist()}, {len(batch.masks)} masks")
        if step == args.steps:
            break
    print(loader.stats())


if __name__ == "__main__":
    with reported():  # a message names the URL, the reason and what to do
        main()

"""Our model compared with the published one, and the properties that training needs."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from sa1b.sam.mask_decoder import AMBIGUOUS, SINGLE
from sa1b.sam.model import PRESETS, ModelConfig, Sam
from tests.sam import published

# A grid of 6 x 6 tokens in windows of 4: padded windows, a windowed block before and after a global one.
SMALL = ModelConfig(
    image_size=96, width=48, depth=3, heads=2, global_blocks=(1,), window=4, channels=64, drop_path=0.4
)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def pair(config: ModelConfig) -> tuple[nn.Module, Sam]:
    """The published model and ours with its weights."""
    reference = published.build(config)
    model = Sam(config)
    model.load_state_dict(reference.state_dict(), strict=True)
    return reference, model.eval()


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, Sam]:
    return pair(SMALL)


def random_images(count: int, size: int = SMALL.image_size) -> Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)


def random_prompts(masks: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Points [M, 2, 2], boxes [M, 4] and logits of an earlier mask [M, 1, size / 4, size / 4]."""
    points = torch.rand(masks, 2, 2) * size
    boxes = torch.cat([torch.rand(masks, 2) * size / 2, (1 + torch.rand(masks, 2)) * size / 2], dim=1)
    return points, boxes, 3 * torch.randn(masks, 1, size // 4, size // 4)


def in_our_form(
    points: Tensor | None, boxes: Tensor | None, masks: int
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Prompts in our form, points [M, P, 2] and labels [M, P], and the published form of the points."""
    parts, labels = [], []
    if points is not None:
        parts.append(points)
        labels.append(torch.tensor([1, 0]).expand(masks, -1))
    if boxes is not None:
        parts.append(boxes.view(masks, 2, 2))
        labels.append(torch.tensor([2, 3]).expand(masks, -1))
    elif points is not None:
        parts.append(torch.zeros(masks, 1, 2))
        labels.append(torch.full((masks, 1), -1))
    theirs = None if points is None else (points, labels[0])
    if not parts:
        return torch.zeros(masks, 0, 2), torch.zeros(masks, 0, dtype=torch.int64), None
    return torch.cat(parts, dim=1), torch.cat(labels, dim=1), theirs


def assert_decodes_alike(reference: nn.Module, model: Sam, prompts: str) -> None:
    """Results of both prompt encoders and decoders, for one embedding and the kinds of prompts in `prompts`."""
    masks, config = 3, model.config
    points, boxes, low_res = random_prompts(masks, config.image_size)
    given_points = points if "point" in prompts else None
    given_boxes = boxes if "box" in prompts else None
    given_low_res = low_res if "mask" in prompts else None
    ours, labels, theirs = in_our_form(given_points, given_boxes, masks)
    embedding = torch.randn(1, config.channels, config.side, config.side)

    sparse, dense = reference.prompt_encoder(points=theirs, boxes=given_boxes, masks=given_low_res)
    our_sparse, our_dense = model.prompt_encoder(ours, labels, given_low_res)
    torch.testing.assert_close(our_sparse, sparse, **CLOSE)
    torch.testing.assert_close(published.dense(our_dense, masks, config.side), dense, **CLOSE)

    logits, iou = reference.mask_decoder.predict_masks(
        embedding, reference.prompt_encoder.get_dense_pe(), sparse, dense
    )
    our_logits, our_iou = model.decode(
        embedding, torch.zeros(masks, dtype=torch.int64), ours, labels, given_low_res
    )
    torch.testing.assert_close(our_logits, logits, **CLOSE)
    torch.testing.assert_close(our_iou, iou, **CLOSE)


KINDS = ["point", "box", "point and box", "mask", "point and mask", "point, box and mask"]


@torch.no_grad()
@pytest.mark.parametrize("prompts", KINDS)
def test_prompts_and_masks_are_those_of_the_published_model(
    small: tuple[nn.Module, Sam], prompts: str
) -> None:
    torch.manual_seed(1)
    assert_decodes_alike(*small, prompts)


@torch.no_grad()
def test_the_position_of_the_image_is_that_of_the_published_model(small: tuple[nn.Module, Sam]) -> None:
    reference, model = small
    torch.testing.assert_close(
        model.prompt_encoder.image_position(), reference.prompt_encoder.get_dense_pe(), **CLOSE
    )


@torch.no_grad()
def test_embeddings_are_those_of_the_published_model(small: tuple[nn.Module, Sam]) -> None:
    reference, model = small
    torch.manual_seed(2)
    images = random_images(2)
    expected = reference.image_encoder(torch.stack([reference.preprocess(image) for image in images]))
    torch.testing.assert_close(model.embed(images), expected, **CLOSE)
    channels_last = images.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model.embed(channels_last), expected, **CLOSE)


@torch.no_grad()
def test_padding_is_zero_after_normalisation_whatever_its_pixels(small: tuple[nn.Module, Sam]) -> None:
    reference, model = small
    torch.manual_seed(3)
    sizes = torch.tensor([[96, 64], [31, 96]])
    images = random_images(2)
    cut = [image[:, :rows, :columns] for image, (rows, columns) in zip(images, sizes.tolist(), strict=True)]
    expected = reference.image_encoder(torch.stack([reference.preprocess(image) for image in cut]))
    torch.testing.assert_close(model.embed(images, sizes=sizes), expected, **CLOSE)


@torch.no_grad()
@pytest.mark.slow
def test_vit_b_at_1024_pixels_is_the_published_model() -> None:
    torch.manual_seed(4)
    reference, model = pair(PRESETS["vit_b"])
    images = random_images(1, 1024)
    expected = reference.image_encoder(reference.preprocess(images[0])[None])
    torch.testing.assert_close(model.embed(images), expected, **CLOSE)
    for prompts in KINDS:
        assert_decodes_alike(reference, model, prompts)


@pytest.mark.parametrize("name", ["vit_b", "vit_l", "vit_h"])
def test_names_and_shapes_of_all_weights_are_the_published_ones(name: str) -> None:
    with torch.device("meta"):
        model, reference = Sam(PRESETS[name]), published.build(PRESETS[name])
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    assert shapes == {key: value.shape for key, value in reference.state_dict().items()}


def build(seed: int, **changes: object) -> Sam:
    torch.manual_seed(seed)
    return Sam(dataclasses.replace(SMALL, **changes))


def test_a_seed_decides_the_weights_and_the_switches_change_neither_them_nor_their_names() -> None:
    plain = build(0).state_dict()
    switched = build(0, checkpoint_blocks="all", compile_blocks=True, drop_path=0.0).state_dict()
    assert list(switched) == list(plain)
    assert all(torch.equal(switched[name], plain[name]) for name in plain)
    other = build(1).state_dict()
    assert not torch.equal(other["image_encoder.pos_embed"], plain["image_encoder.pos_embed"])


def kept(blocks: list[list[bool]]) -> Tensor:
    """[B, depth, 2] from [B, depth]: the same values for attention and MLP."""
    return torch.tensor(blocks)[..., None].expand(-1, -1, 2)


def gradients(model: Sam, images: Tensor, keep: Tensor | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    model.embed(images, keep).square().mean().backward()
    encoder = model.image_encoder.named_parameters()
    return {name: parameter.grad.clone() for name, parameter in encoder if parameter.grad is not None}


def test_activation_checkpointing_leaves_the_gradients_and_saves_less() -> None:
    images, keep = random_images(2), kept([[True, False, True], [True, True, True]])
    saved = {"none": 0, "every:2": 0, "all": 0}
    found = {}
    for switch in saved:
        model = build(0, checkpoint_blocks=switch)

        def note(tensor: Tensor, switch: str = switch) -> Tensor:
            saved[switch] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            embeddings = model.embed(images, keep)
        found[switch] = gradients(model, images, keep)
        assert embeddings.requires_grad
    assert saved["all"] < saved["none"] / 3
    assert saved["all"] < saved["every:2"] < 0.7 * saved["none"]  # two of the three blocks
    for switch in ("every:2", "all"):
        torch.testing.assert_close(found[switch], found["none"], rtol=0, atol=0)
        assert len(found[switch]) == len(list(model.image_encoder.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_blocks", ["none", "all"])
def test_compiled_blocks_compute_the_same(checkpoint_blocks: str) -> None:
    images, keep = random_images(2), kept([[True, False, True], [True, True, True]])
    plain, compiled = build(0), build(0, compile_blocks=True, checkpoint_blocks=checkpoint_blocks)
    # A batch of another size makes torch compile again, for any size.
    for some, kept_branches in ((images, None), (images, keep), (images[:1], keep[:1])):
        torch.testing.assert_close(
            compiled.embed(some, kept_branches), plain.embed(some, kept_branches), **CLOSE
        )
        torch.testing.assert_close(
            gradients(compiled, some, kept_branches),
            gradients(plain, some, kept_branches),
            rtol=1e-3,
            atol=1e-5,
        )
    assert list(compiled.state_dict()) == list(plain.state_dict())


@torch.no_grad()
def test_masks_of_differing_images_decode_as_if_one_by_one() -> None:
    model = build(0)
    torch.manual_seed(5)
    embeddings = torch.randn(3, SMALL.channels, SMALL.side, SMALL.side)
    image = torch.tensor([2, 0, 2, 1, 0])
    points, _, low_res = random_prompts(5, SMALL.image_size)
    labels = torch.tensor([[1, 0], [1, -1], [2, 3], [-1, -1], [0, 1]])
    has = torch.tensor([True, False, True, False, False])
    logits, iou = model.decode(embeddings, image, points, labels, low_res, has)
    assert logits.shape == (5, 4, 24, 24)
    assert iou.shape == (5, 4)
    for i in range(5):
        one = slice(i, i + 1)
        mask = low_res[one] if has[i] else None
        alone = model.decode(embeddings, image[one], points[one], labels[one], mask)
        torch.testing.assert_close(logits[one], alone[0], **CLOSE)
        torch.testing.assert_close(iou[one], alone[1], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("counts", [(2, 1, 2), (5,), (1, 1, 1, 1, 1), (0, 4, 0, 1)])
def test_masks_that_share_an_image_decode_as_with_copies_of_its_embedding(counts: tuple[int, ...]) -> None:
    model = build(0)
    torch.manual_seed(8)
    embeddings = torch.randn(len(counts), SMALL.channels, SMALL.side, SMALL.side)
    image = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    points, _, low_res = random_prompts(5, SMALL.image_size)
    labels = torch.tensor([[1, 0], [1, -1], [2, 3], [-1, -1], [0, 1]])
    for before in (None, low_res):
        expected = model.decode(embeddings, image, points, labels, before)
        found = model.decode(embeddings, image, points, labels, before, counts=counts)
        torch.testing.assert_close(found, expected, **CLOSE)
        for candidates in (SINGLE, AMBIGUOUS):
            few = model.decode(
                embeddings, image, points, labels, before, counts=counts, candidates=candidates
            )
            torch.testing.assert_close(few, tuple(one[:, candidates] for one in expected), **CLOSE)


def test_counts_that_do_not_add_up_are_refused() -> None:
    model, image = build(0), torch.tensor([0, 0, 1])
    embeddings = torch.zeros(2, SMALL.channels, SMALL.side, SMALL.side)
    points, labels = torch.zeros(3, 1, 2), torch.ones(3, 1, dtype=torch.int64)
    for counts in ((2, 2), (3,), (1, 1, 1)):
        with pytest.raises(ValueError, match="counts=.* must be the masks of 2 images, 3 in all"):
            model.decode(embeddings, image, points, labels, counts=counts)


def grouped_gradients(model: Sam) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


PROMPTS = {
    "no prompt": (torch.zeros(2, 0, 2), torch.zeros(2, 0, dtype=torch.int64), None, None),
    "points": (torch.full((2, 1, 2), 7.0), torch.ones(2, 1, dtype=torch.int64), None, None),
    "only nothing": (torch.zeros(2, 1, 2), -torch.ones(2, 1, dtype=torch.int64), None, None),
    "masks": (torch.zeros(2, 0, 2), torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 1, 24, 24), None),
    "no mask after all": (
        torch.zeros(2, 0, 2),
        torch.zeros(2, 0, dtype=torch.int64),
        torch.full((2, 1, 24, 24), torch.nan),
        torch.zeros(2, dtype=torch.bool),
    ),
}


@pytest.mark.parametrize("prompts", PROMPTS)
def test_every_parameter_gets_a_finite_gradient_whatever_the_prompts(prompts: str) -> None:
    model = build(0)
    embeddings = model.embed(random_images(1))
    logits, iou = model.decode(embeddings, torch.tensor([0, 0]), *PROMPTS[prompts])
    (logits.square().mean() + iou.square().mean()).backward()
    bad = [
        name
        for name, gradient in grouped_gradients(model).items()
        if gradient is None or not gradient.isfinite().all()
    ]
    assert bad == []


@pytest.mark.parametrize("images", [0, 1])
def test_no_masks_or_not_even_images_still_give_gradients_of_zero(images: int) -> None:
    model = build(0)
    keep = torch.ones(images, SMALL.depth, 2, dtype=torch.bool)
    sizes = torch.full((images, 2), 64)
    embeddings = model.embed(random_images(images), keep, sizes)
    none = torch.zeros(0, dtype=torch.int64)
    labels = torch.zeros(0, 3, dtype=torch.int64)
    low_res, has = torch.zeros(0, 1, 24, 24), torch.zeros(0, dtype=torch.bool)
    logits, iou = model.decode(embeddings, none, torch.zeros(0, 3, 2), labels, low_res, has)
    assert embeddings.shape == (images, 64, 6, 6)
    assert logits.shape == (0, 4, 24, 24)
    assert iou.shape == (0, 4)
    (logits.sum() + iou.sum()).backward()
    for name, gradient in grouped_gradients(model).items():
        assert gradient is not None, name
        assert not gradient.any(), name


@torch.no_grad()
def test_an_image_that_goes_through_no_block_keeps_its_patches() -> None:
    model = build(0)
    images = random_images(2)
    keep = kept([[False] * 3, [True] * 3])
    without_blocks = build(0)
    without_blocks.image_encoder.blocks = nn.ModuleList()
    torch.testing.assert_close(model.embed(images, keep)[:1], without_blocks.embed(images)[:1])
    assert not torch.allclose(model.embed(images, keep)[1:], without_blocks.embed(images)[1:], atol=1e-2)


@torch.no_grad()
def test_drop_path_scales_what_goes_through_by_the_inverse_of_its_probability() -> None:
    assert SMALL.drop_rates == pytest.approx((0, 0.2, 0.4))
    block = build(0).image_encoder.blocks[2]
    x = torch.randn(3, 6, 6, SMALL.width)
    scaled = block(x, torch.tensor([[1 / 0.6, 1 / 0.6], [0.0, 0.0], [0.0, 1 / 0.6]]))
    with_attention = x + block.attend(block.norm1(x)) / 0.6
    expected = with_attention + block.mlp(block.norm2(with_attention)) / 0.6
    torch.testing.assert_close(scaled[0], expected[0])
    assert torch.equal(scaled[1], x[1])
    torch.testing.assert_close(scaled[2], x[2] + block.mlp(block.norm2(x[2])) / 0.6)
    # The encoder scales by the same factor:
    model, images = build(0), random_images(2)
    seen = []
    for one in model.image_encoder.blocks:
        one.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].tolist()))
    keep = torch.tensor([[[True, True]] * 3, [[True, True], [False, True], [True, False]]])
    model.embed(images, keep)
    expected = [[[1, 1], [1, 1]], [[1 / 0.8, 1 / 0.8], [0, 1 / 0.8]], [[1 / 0.6, 1 / 0.6], [1 / 0.6, 0]]]
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected))


@torch.no_grad()
def test_images_of_another_size_or_type_are_refused() -> None:
    model = build(0)
    with pytest.raises(ValueError, match=r"image_size"):
        model.embed(random_images(1, 64))
    with pytest.raises(ValueError, match=r"uint8"):
        model.embed(random_images(1).float())
    with pytest.raises(ValueError, match=r"keep"):
        model.embed(random_images(2), torch.ones(3, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"sizes"):
        model.embed(random_images(2), sizes=torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 100}, "--model.image-size 100: must be a multiple of --model.patch-size 16"),
        ({"heads": 5}, "--model.width 48: must be a multiple of --model.heads 5"),
        ({"channels": 48}, "--model.channels 48: must be a multiple of 32"),
        ({"global_blocks": (3,)}, "must be from 0 to 2"),
        (
            {"checkpoint_blocks": "every:0"},
            r"--model.checkpoint-blocks every:0: must be none, all or every:2",
        ),
        ({"drop_path": 1.0}, "--model.drop-path 1: must be from 0"),
        ({"window": 0}, "--model.window 0: must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@torch.no_grad()
def test_an_untrained_decoder_attends_to_the_position_of_a_point() -> None:
    torch.manual_seed(7)
    model = Sam(PRESETS["tiny"])
    side, size = model.config.side, model.config.image_size
    position = model.prompt_encoder.image_position().flatten(2)[0]
    points = torch.rand(64, 1, 2) * size
    embedding = model.prompt_encoder.embed_points(points, torch.ones(64, 1, dtype=torch.int64))[:, 0]
    embedding = embedding - model.prompt_encoder.point_embeddings[1].weight
    layers = [layer.cross_attn_token_to_image for layer in model.mask_decoder.transformer.layers]
    for attention in (*layers, model.mask_decoder.transformer.final_attn_token_to_image):
        logits = attention.q_proj(embedding) @ attention.k_proj(position.T).T
        row, column = logits.argmax(1) // side, logits.argmax(1) % side
        found = (torch.stack([column, row], dim=1) + 0.5) * size / side
        assert (found - points[:, 0]).abs().max(1).values.median() < size / side


def test_weights_in_half_precision_work_without_autocast() -> None:
    model = build(0).to(torch.bfloat16)
    embeddings = model.embed(random_images(1))
    points, _, low_res = random_prompts(2, SMALL.image_size)
    labels = torch.ones(2, 2, dtype=torch.int64)
    logits, iou = model.decode(embeddings, torch.tensor([0, 0]), points, labels, low_res)
    (logits.float().mean() + iou.float().mean()).backward()
    assert embeddings.dtype == logits.dtype == torch.bfloat16


def test_the_tiny_model_learns_one_mask() -> None:
    torch.manual_seed(6)
    model = Sam(dataclasses.replace(PRESETS["tiny"], image_size=64, depth=2, width=64, global_blocks=(1,)))
    images = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    images[:, :, 16:48, 8:40] = 200
    target = torch.zeros(1, 1, 16, 16)
    target[:, :, 4:12, 2:10] = 1
    points, labels = torch.tensor([[[24.0, 32.0]]]), torch.tensor([[1]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(60):
        logits, _ = model.decode(model.embed(images), torch.tensor([0]), points, labels)
        loss = nn.functional.binary_cross_entropy_with_logits(logits[:, :1], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mask = logits[:, :1] > 0
    truth = target.bool()
    assert (mask & truth).sum() / (mask | truth).sum() > 0.9

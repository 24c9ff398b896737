"""How large an image may be. Without imports: command lines show these numbers in their help."""

MAX_IMAGE_PIXELS = 1 << 24  # real files: 2250 x 1500; decoding a progressive JPEG takes 9 bytes a pixel
MAX_STORED_PIXELS = 1 << 28  # what --max-pixels may allow at most; every reader takes images of this size

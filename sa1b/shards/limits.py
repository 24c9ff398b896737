"""Limits of the size of an image. No imports: the help texts of commands show these numbers."""

MAX_IMAGE_PIXELS = 1 << 24  # real files: 2250 x 1500; decoding a progressive JPEG takes 9 bytes a pixel
MAX_STORED_PIXELS = 1 << 28  # upper limit of --max-pixels; every reader accepts images of this size

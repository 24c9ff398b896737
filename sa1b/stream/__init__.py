"""How samples reach the device: in which order, out of which view, with which random choices."""

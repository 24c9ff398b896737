"""Annotation of images by a trained model, in SA-1B's form."""

"""A gallery: any input as one HTML page that shows its masks and their distributions."""

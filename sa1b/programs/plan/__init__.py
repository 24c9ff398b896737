"""`sa1b plan`: disk and time of an ingest run, and memory and time of a training run."""

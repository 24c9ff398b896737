"""Transfer: verified copies of dataset directories between folders and buckets."""

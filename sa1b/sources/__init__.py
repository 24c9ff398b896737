"""Input of ingest: tars, folders and checklists; their members, and the pairing of members."""

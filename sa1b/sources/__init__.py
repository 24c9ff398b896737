"""What comes in: tars, folders, checklists; members and their pairing."""

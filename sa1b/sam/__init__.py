"""The Segment Anything model, and the recipe that turns masks into prompts and losses."""

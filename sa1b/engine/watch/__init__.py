"""What a run observes: phases, figures, signals, and ranks that hang."""

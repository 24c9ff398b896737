"""What a run observes: phases, times, metrics, signals, and ranks that fall behind."""

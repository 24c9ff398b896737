"""Synthetic source tars: SA-1B's form, laws and quirks, with drawn images."""

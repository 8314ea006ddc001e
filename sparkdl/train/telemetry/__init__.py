"""What a run tells about itself while it trains: history, progress events, the losses of the newest steps."""

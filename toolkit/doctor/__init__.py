"""What this machine will do to a result: observe, judge, and change on request only."""

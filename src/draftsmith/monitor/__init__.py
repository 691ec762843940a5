"""What a run says about itself: state.json and events.jsonl, and who reads them."""

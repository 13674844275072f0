"""Where a run is kept: keys and bytes under one URI, directories moved in and out of it, and manifests."""

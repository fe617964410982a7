"""`minserve bench`: speeds as ratios against a named peer, all measured in turn in one run."""

"""What all benches share: sessions on the rig, whole runs, the result of a bench, its page and its figure."""

"""What happens to stored samples later: retention, deletion, checks, quarantine and recovery."""

"""Steps one after the other, each checked, and a last file that tells how it was made."""

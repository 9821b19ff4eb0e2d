"""The one driver that every algorithm shares, and the parts it is assembled from."""

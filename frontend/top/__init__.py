"""`gapless top`: what a server tells over HTTP (`source`), the figures in it (`figures`), a screen (`screen`)."""

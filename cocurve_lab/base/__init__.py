"""What every room uses: errors, arguments, files that survive a crash, progress bars, plugs."""

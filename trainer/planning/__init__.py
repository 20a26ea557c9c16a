"""What is decided: plan, batch, schedule and costs, as pure functions of settings. No torch, no process group."""

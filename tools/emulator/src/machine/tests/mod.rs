mod barriers;
mod checks;
mod flow;
mod launches;
#[cfg(unix)]
mod speed;

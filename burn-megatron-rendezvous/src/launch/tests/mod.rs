//! Tests: recorded environments, every error, addresses, and host lists.

mod address;
mod errors;
mod lists;
mod recorded;

use super::*;

/// Reads an environment of `NAME=value` lines; names of a later one replace those of an earlier one,
/// and `NAME` alone takes one out.
fn read(texts: &[&str]) -> Result<Option<(Launch, Origins)>, LaunchEnvError> {
    let mut vars: Vec<(&str, &str)> = Vec::new();
    for line in texts.iter().flat_map(|text| text.lines()).map(str::trim) {
        let name = line.split('=').next().unwrap_or(line);
        vars.retain(|(known, _)| *known != name);
        vars.extend(line.split_once('='));
    }
    Launch::with_origins(&|name| {
        let found = vars.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    })
}

fn launch(texts: &[&str]) -> Launch {
    read(texts).unwrap().unwrap().0
}

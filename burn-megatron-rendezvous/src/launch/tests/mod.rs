//! Tests of recorded environments, errors, addresses and host lists.

mod address;
mod errors;
mod lists;
mod recorded;

use super::*;

/// Reads a launch from texts that consist of `NAME=value` lines. Later texts override earlier texts. A line that
/// consists only of `NAME` unsets the variable.
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

//! Parses flags in tests.

use clap::{Args, Command, Error};

/// Parses the flags of a command, without the name of the command.
pub fn parse<T: Args>(flags: &[&str]) -> Result<T, Error> {
    let command = T::augment_args(Command::new("test").no_binary_name(true));
    T::from_arg_matches(&command.try_get_matches_from(flags)?)
}

/// Parses flags that are separated by spaces.
pub fn parse_text<T: Args>(flags: &str) -> Result<T, Error> {
    parse(&flags.split_whitespace().collect::<Vec<_>>())
}

//! Flags as tests write them.

use clap::{Args, Command, Error};

/// The flags of a command, without its name.
pub fn parse<T: Args>(flags: &[&str]) -> Result<T, Error> {
    let command = T::augment_args(Command::new("test").no_binary_name(true));
    T::from_arg_matches(&command.try_get_matches_from(flags)?)
}

/// The same, of a text in which blanks separate the flags.
pub fn parse_text<T: Args>(flags: &str) -> Result<T, Error> {
    parse(&flags.split_whitespace().collect::<Vec<_>>())
}

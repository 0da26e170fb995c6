//! Errors of chat templates.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use super::super::TokenizerError;

/// An error of reading or rendering a chat template.
#[derive(Debug, thiserror::Error)]
pub enum ChatTemplateError {
    /// The file cannot be read.
    #[error("cannot read '{path}': {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file beside the tokenizer is not JSON.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The configuration has a `chat_template` that is neither a text nor a list with one named `default`.
    #[error(
        "'{path}' has a chat_template without a text: expected a string, or a list of {{name, template}} with the name \
         \"default\""
    )]
    Config {
        /// The file.
        path: PathBuf,
    },
    /// The template is not valid.
    #[error("the chat template of {name} is not valid: {source}")]
    Invalid {
        /// Where it was read.
        name: String,
        /// The cause.
        source: Box<minijinja::Error>,
    },
    /// The template asks for the date, and there is none.
    #[error(
        "the chat template of {name} writes the date (strftime_now): set data.chat.date, as in \"2025-01-31\""
    )]
    Date {
        /// Where it was read.
        name: String,
    },
    /// The template does not accept the conversation.
    #[error("the chat template of {name}: {}", causes(source))]
    Render {
        /// Where it was read.
        name: String,
        /// The cause.
        source: Box<minijinja::Error>,
    },
}

/// An error with its causes, as an error within a macro has the line of its call.
fn causes(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

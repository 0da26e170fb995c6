//! Errors of chat templates.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use super::super::TokenizerError;

/// An error that occurred while a chat template was read or rendered.
#[derive(Debug, thiserror::Error)]
pub enum ChatTemplateError {
    /// The template file cannot be read.
    #[error("cannot read '{path}': {source}")]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A file next to the tokenizer is not JSON.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The `chat_template` of the configuration is neither a text nor a list with an entry named `default`.
    #[error(
        "'{path}' has a chat_template without a text: expected a string, or a list of {{name, template}} with the name \
         \"default\""
    )]
    Config {
        /// The path of the file.
        path: PathBuf,
    },
    /// The template is not a valid Jinja template.
    #[error("the chat template of {name} is not valid: {source}")]
    Invalid {
        /// The file or folder from which the template was read.
        name: String,
        /// The cause.
        source: Box<minijinja::Error>,
    },
    /// The template uses the date, but no date is set.
    #[error(
        "the chat template of {name} writes the date (strftime_now): set data.chat.date, as in \"2025-01-31\""
    )]
    Date {
        /// The file or folder from which the template was read.
        name: String,
    },
    /// The template fails to render the conversation.
    #[error("the chat template of {name}: {}", causes(source))]
    Render {
        /// The file or folder from which the template was read.
        name: String,
        /// The cause.
        source: Box<minijinja::Error>,
    },
}

/// Formats an error with its causes, because the line of an error within a macro is the line of its call.
fn causes(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

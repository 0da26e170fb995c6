//! Errors of conversations.

use std::path::{Path, PathBuf};

use super::record::ROLES;
use crate::tokenizer::TokenizerError;
use crate::tokenizer::chat::ChatTemplateError;

/// An error of reading conversations.
#[derive(Debug, thiserror::Error)]
pub enum ChatDataError {
    /// A line of a file.
    #[error("'{path}', line {line}: {source}")]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The error of the line.
        source: ChatLineError,
    },
    /// The folder contains no `.jsonl` file.
    #[error("no file in '{0}' ends in .jsonl")]
    NoFiles(PathBuf),
    /// There is no conversation to train on.
    #[error("no conversation to train on{counts}")]
    NoExamples {
        /// A description of the examples that were left out.
        counts: String,
    },
    /// Invalid share of held-out conversations.
    #[error("invalid share {0} of held-out conversations: expected 0 to below 1, as in 0.1")]
    Share(f64),
    /// There are too few conversations to hold out this share.
    #[error(
        "a share of {share} cannot be held out of {count} conversation(s), because at least one must remain to train \
         on: give more conversations, held-out files, or a share of 0"
    )]
    TooFew {
        /// The number of conversations.
        count: usize,
        /// The share.
        share: f64,
    },
    /// The requested row length differs from the packed rows.
    #[error("the conversations were packed into rows of {opened} tokens, not {seq}")]
    Length {
        /// The length of the packed rows.
        opened: usize,
        /// The requested length.
        seq: usize,
    },
}

/// An error of a line.
#[derive(Debug, thiserror::Error)]
pub enum ChatLineError {
    /// The line is not UTF-8.
    #[error("it is not UTF-8 from byte {0} on")]
    NotUtf8(usize),
    /// The line is not JSON.
    #[error("it is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The line has none of the supported conversation formats.
    #[error(
        "expected an object with `prompt` and `completion` (or `answer`), with `messages`, or with `conversations`; found \
         {0}"
    )]
    Form(String),
    /// A value has the wrong type.
    #[error("invalid {what}: expected {expected}")]
    Type {
        /// The key.
        what: String,
        /// The expected value.
        expected: &'static str,
    },
    /// The text is not JSON, but JSON is expected.
    #[error("invalid {what}: it is a text that is not JSON: {source}")]
    JsonText {
        /// The key.
        what: String,
        /// The error of the parser.
        source: serde_json::Error,
    },
    /// The template leaves out the text of a message whose content is a list of parts.
    #[error(
        "the content of message {message} is a list of parts, and the chat template leaves out their text: give the content \
         as a text, or set data.chat.template to a template that reads parts"
    )]
    Parts {
        /// The message, from 1.
        message: usize,
    },
    /// Unknown role.
    #[error("message {message} has the role {role:?}: expected {}", ROLES.join(", "))]
    Role {
        /// The message, from 1.
        message: usize,
        /// Its role.
        role: String,
    },
    /// The answer has no text.
    #[error(
        "the answer in message {message} is empty: remove the line, or write the answer to train on"
    )]
    EmptyAnswer {
        /// The message, from 1.
        message: usize,
    },
    /// No message has the role `assistant`.
    #[error("no message has the role assistant: add an answer to train on")]
    NoAnswer,
    /// The text contains the characters that mark answers while a template is rendered.
    #[error("it has U+FDD0 or U+FDD1, which are not characters of text: remove them")]
    Noncharacter,
    /// The line has messages, but there is no template to render them.
    #[error(
        "it has messages, and the tokenizer {0} has no chat template: set data.chat.template to a file of one, or give \
         `prompt` and `completion` as text"
    )]
    NoTemplate(String),
    /// No token ends an answer.
    #[error(
        "the tokenizer {0} has neither a chat template nor an end token, so answers would not end"
    )]
    NoEnd(String),
    /// The template fails.
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
    /// The template changes the text before an answer once the answer is added.
    #[error(
        "the chat template changes the text before message {message} when {follows}, so the tokens of the answer \
         cannot be identified: set data.chat.loss to \"last\" to train the last answer of each conversation, or \
         data.chat.template to a template that marks answers with {{% generation %}}"
    )]
    NoPrefix {
        /// The message, from 1.
        message: usize,
        /// The text that changes it.
        follows: &'static str,
    },
    /// The number of marked answers differs from the number of messages of the assistant.
    #[error(
        "the chat template marks {marked} answers with {{% generation %}}, and the conversation has {answers}"
    )]
    Marks {
        /// The number of marked answers.
        marked: usize,
        /// The number of messages of the assistant.
        answers: usize,
    },
    /// The rendered text contains no token of the answers.
    #[error("no token has a loss: the chat template does not render the answers")]
    NoTokens,
    /// The tokenizer fails.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The example does not fit a row.
    #[error(
        "it has {tokens} tokens, and a row of {seq} has space for {}: use a train.sequence_length of at least {}, or set \
         data.chat.long to \"truncate\" or \"drop\"", seq + 1, tokens - 1
    )]
    Long {
        /// The number of tokens of the example.
        tokens: usize,
        /// The number of tokens per row.
        seq: usize,
    },
}

impl ChatLineError {
    /// Adds the file and the line to the error.
    pub(super) fn at(self, path: &Path, line: u64) -> ChatDataError {
        ChatDataError::Line {
            path: path.into(),
            line,
            source: self,
        }
    }
}

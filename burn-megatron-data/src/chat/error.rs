//! Errors of reading conversations.

use std::path::{Path, PathBuf};

use super::record::ROLES;
use crate::tokenizer::TokenizerError;
use crate::tokenizer::chat::ChatTemplateError;

/// An error that occurred while conversations were read.
#[derive(Debug, thiserror::Error)]
pub enum ChatDataError {
    /// A line of a file is invalid.
    #[error("'{path}', line {line}: {source}")]
    Line {
        /// The path of the file.
        path: PathBuf,
        /// The line number, counted from 1.
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
    /// The share of held-out conversations is invalid.
    #[error(
        "invalid share {0} of held-out conversations: expected at least 0 and below 1, such as 0.1"
    )]
    Share(f64),
    /// There are too few conversations to hold out the requested share.
    #[error(
        "a share of {share} cannot be held out of {count} conversation(s), because at least one must remain to train \
         on: give more conversations, held-out files, or a share of 0"
    )]
    TooFew {
        /// The number of conversations.
        count: usize,
        /// The requested share.
        share: f64,
    },
    /// The requested sequence length differs from the length of the packed sequences.
    #[error("the conversations were packed into rows of {opened} tokens, not {seq}")]
    Length {
        /// The length of the packed sequences, in tokens.
        opened: usize,
        /// The requested sequence length, in tokens.
        seq: usize,
    },
}

/// An error in a line of a file with conversations.
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
        /// The key of the value.
        what: String,
        /// The expected value.
        expected: &'static str,
    },
    /// The text is not JSON, but JSON is expected.
    #[error("invalid {what}: the text is not JSON: {source}")]
    JsonText {
        /// The key of the text.
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
        /// The number of the message, counted from 1.
        message: usize,
    },
    /// The role of a message is unknown.
    #[error("message {message} has the role {role:?}: expected {}", ROLES.join(", "))]
    Role {
        /// The number of the message, counted from 1.
        message: usize,
        /// The role of the message.
        role: String,
    },
    /// The answer has no text.
    #[error(
        "the answer in message {message} is empty: remove the line, or write the answer to train on"
    )]
    EmptyAnswer {
        /// The number of the message, counted from 1.
        message: usize,
    },
    /// No message has the role `assistant`.
    #[error("no message has the role assistant: add an answer to train on")]
    NoAnswer,
    /// The text contains the noncharacters that internally mark answers while a template is rendered.
    #[error("it has U+FDD0 or U+FDD1, which are not characters of text: remove them")]
    Noncharacter,
    /// The line has messages, but there is no template to render them.
    #[error(
        "it has messages, but the tokenizer {0} has no chat template: set data.chat.template to a template file, or \
         give `prompt` and `completion` as text"
    )]
    NoTemplate(String),
    /// The tokenizer has neither a chat template nor an end token, so answers would not end.
    #[error(
        "the tokenizer {0} has neither a chat template nor an end token, so answers would not end"
    )]
    NoEnd(String),
    /// The chat template fails.
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
    /// The chat template renders the text before an answer differently after the answer is added, so the tokens of the
    /// answer cannot be determined.
    #[error(
        "the chat template changes the text before message {message} when {follows}, so the tokens of the answer \
         cannot be identified: set data.chat.loss to \"last\" to train the last answer of each conversation, or \
         data.chat.template to a template that marks answers with {{% generation %}}"
    )]
    NoPrefix {
        /// The number of the message, counted from 1.
        message: usize,
        /// A clause of the message that names what is added when the text changes, such as `it follows`.
        follows: &'static str,
    },
    /// The chat template marks a number of answers that differs from the number of messages with the role `assistant`.
    #[error(
        "the chat template marks {marked} answers with {{% generation %}}, and the conversation has {answers}"
    )]
    Marks {
        /// The number of answers that the chat template marks.
        marked: usize,
        /// The number of messages with the role `assistant`.
        answers: usize,
    },
    /// The rendered text contains no token of the answers.
    #[error("no token has a loss: the chat template does not render the answers")]
    NoTokens,
    /// The tokenizer fails to tokenize the text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The example is longer than the sequence length.
    #[error(
        "it has {tokens} tokens, and a row of {seq} has space for {}: use a train.sequence_length of at least {}, or set \
         data.chat.long to \"truncate\" or \"drop\"", seq + 1, tokens - 1
    )]
    Long {
        /// The number of tokens of the example.
        tokens: usize,
        /// The sequence length, in tokens.
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

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
        /// The fault of the line.
        source: ChatLineError,
    },
    /// A folder has no file of JSON lines.
    #[error("no file in '{0}' ends in .jsonl")]
    NoFiles(PathBuf),
    /// There is nothing to train on.
    #[error("no conversation to train on{counts}")]
    NoExamples {
        /// The examples that were left out.
        counts: String,
    },
    /// The share cannot be held out.
    #[error("invalid share {0} of held-out conversations: expected 0 to below 1, as in 0.1")]
    Share(f64),
    /// The number of conversations is too small to be split.
    #[error(
        "a share of {share} cannot be held out of {count} conversation(s), so that one is left to train on: give more, \
         held-out files, or a share of 0"
    )]
    TooFew {
        /// All conversations.
        count: usize,
        /// The share.
        share: f64,
    },
    /// The rows have another length.
    #[error("the conversations were packed into rows of {opened} tokens, not {seq}")]
    Length {
        /// The length of the rows.
        opened: usize,
        /// The length that was asked for.
        seq: usize,
    },
}

/// The fault of a line.
#[derive(Debug, thiserror::Error)]
pub enum ChatLineError {
    /// It is not UTF-8.
    #[error("it is not UTF-8 from byte {0} on")]
    NotUtf8(usize),
    /// It is not JSON.
    #[error("it is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// It has none of the forms of a conversation.
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
    /// A text that is not JSON where JSON is expected.
    #[error("invalid {what}: it is a text that is not JSON: {source}")]
    JsonText {
        /// The key.
        what: String,
        /// The error of the parser.
        source: serde_json::Error,
    },
    /// The template writes nothing for a list of parts.
    #[error(
        "the content of message {message} is a list of parts, and the chat template leaves out their text: give the content \
         as a text, or set data.chat.template to a template that reads parts"
    )]
    Parts {
        /// The message, from 1.
        message: usize,
    },
    /// A role that is not known.
    #[error("message {message} has the role {role:?}: expected {}", ROLES.join(", "))]
    Role {
        /// The message, from 1.
        message: usize,
        /// Its role.
        role: String,
    },
    /// An answer without text.
    #[error(
        "the answer in message {message} is empty: remove the line, or write what is to be learnt"
    )]
    EmptyAnswer {
        /// The message, from 1.
        message: usize,
    },
    /// No message is an answer.
    #[error("no message has the role assistant, so that there is nothing to learn")]
    NoAnswer,
    /// The text has the characters that mark answers while a template is rendered.
    #[error("it has U+FDD0 or U+FDD1, which are no characters of text: remove them")]
    Noncharacter,
    /// Messages, and no template to render them.
    #[error(
        "it has messages, and the tokenizer {0} has no chat template: set data.chat.template to a file of one, or give \
         `prompt` and `completion` as text"
    )]
    NoTemplate(String),
    /// No token ends an answer.
    #[error(
        "the tokenizer {0} has neither a chat template nor an end token, so that an answer would not end"
    )]
    NoEnd(String),
    /// The template fails.
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
    /// The text before an answer is another one once the answer follows.
    #[error(
        "the chat template writes what is before message {message} differently once {follows}, so that the tokens of the \
         answer cannot be told from the others: set data.chat.loss to \"last\" to train the last answer of each \
         conversation, or data.chat.template to a template that marks answers with {{% generation %}}"
    )]
    NoPrefix {
        /// The message, from 1.
        message: usize,
        /// The text that changes it.
        follows: &'static str,
    },
    /// The marks of the template are not those of the answers.
    #[error(
        "the chat template marks {marked} answers with {{% generation %}}, and the conversation has {answers}"
    )]
    Marks {
        /// The marked ones.
        marked: usize,
        /// Messages of the assistant.
        answers: usize,
    },
    /// No token of the answers is left.
    #[error("no token has a loss: the chat template leaves the answers out")]
    NoTokens,
    /// The tokenizer fails.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// It does not fit a row.
    #[error(
        "it has {tokens} tokens, and a row of {seq} has space for {}: use a train.sequence_length of at least {}, or set \
         data.chat.long to \"truncate\" or \"drop\"", seq + 1, tokens - 1
    )]
    Long {
        /// Its tokens.
        tokens: usize,
        /// Tokens of a row.
        seq: usize,
    },
}

impl ChatLineError {
    /// With the place of the line.
    pub(super) fn at(self, path: &Path, line: u64) -> ChatDataError {
        ChatDataError::Line {
            path: path.into(),
            line,
            source: self,
        }
    }
}

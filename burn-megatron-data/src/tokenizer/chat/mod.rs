//! Chat templates, which render a conversation as text, like in `transformers`.
//!
//! A [`ChatTemplate`] is the Jinja template in the folder of a tokenizer. Its environment is compatible with
//! `transformers` 5.24 (`utils/chat_template_utils.py`). Blocks are trimmed, and `tojson` works like `json.dumps` in
//! Python. Strings and dictionaries have the methods of Python, and `{% generation %}` marks the text of the assistant.

mod environment;
mod error;
mod json;
mod source;
#[cfg(test)]
mod tests;
mod value;

use std::ops::Range;
use std::path::Path;

use chrono::NaiveDate;
use minijinja::{Environment, ErrorKind};
use xxhash_rust::xxh3::Xxh3;

use super::Tokenizer;
use environment::{ANSWER_BEGINS, ANSWER_ENDS};
pub use error::ChatTemplateError;
use source::TemplateSource;
pub use value::{JsonValue, ordered_map};

/// A value that a template reads: a message of a conversation, or another variable.
pub type ChatValue = minijinja::Value;

/// The names of the templates for conversations without and with tools.
const NAMES: [&str; 2] = ["default", "tool_use"];

/// A chat template, with the special tokens that the template can write.
pub struct ChatTemplate {
    environment: Environment<'static>,
    name: String,
    special: Vec<(String, String)>,
    marks_answers: bool,
    has_tool_use: bool,
    fingerprint: u64,
}

/// A conversation that a template renders.
#[derive(Clone, Copy, Debug)]
pub struct Chat<'a> {
    /// The messages. Each message is a map with a `role`, a `content` and other keys that the template reads.
    pub messages: &'a [ChatValue],
    /// The schemas of the tools that the assistant can call.
    pub tools: Option<&'a ChatValue>,
    /// A map of additional variables of the template, such as `enable_thinking`.
    pub variables: Option<&'a ChatValue>,
}

/// A rendered conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedChat {
    /// The rendered text.
    pub text: String,
    /// The byte ranges of the text that `{% generation %}` marks, in ascending order.
    pub answers: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// Reads the chat template in the folder of a tokenizer. If the folder has no `chat_template.jinja`, the template
    /// is read from `chat_template` in `tokenizer_config.json`. Returns `None` if there is no template, for example for
    /// the byte-level tokenizer. `date` is the date that `strftime_now` returns in the template. Without a date,
    /// `strftime_now` is undefined, so the rendered text does not depend on the current day.
    ///
    /// # Errors
    ///
    /// [`ChatTemplateError`] if a file cannot be read, or if the template is invalid.
    pub fn of(
        tokenizer: &Tokenizer,
        date: Option<NaiveDate>,
    ) -> Result<Option<Self>, ChatTemplateError> {
        let source = TemplateSource::beside(tokenizer)?;
        source
            .map(|source| Self::new(tokenizer, source, date))
            .transpose()
    }

    /// Reads the chat template in a file. The special tokens are taken from a tokenizer.
    ///
    /// # Errors
    ///
    /// The errors of [`of`](Self::of).
    pub fn read(
        file: &Path,
        tokenizer: &Tokenizer,
        date: Option<NaiveDate>,
    ) -> Result<Self, ChatTemplateError> {
        Self::new(tokenizer, TemplateSource::read(file)?, date)
    }

    fn new(
        tokenizer: &Tokenizer,
        source: TemplateSource,
        date: Option<NaiveDate>,
    ) -> Result<Self, ChatTemplateError> {
        let mut environment = environment::environment(date);
        let mut hash = Xxh3::new();
        let (mut marks_answers, mut has_tool_use) = (false, false);
        for (name, text) in source.templates {
            hash.update(text.as_bytes());
            let (text, marks) = environment::with_calls(&text);
            marks_answers |= marks;
            has_tool_use |= name == NAMES[1];
            environment
                .add_template_owned(name, text)
                .map_err(|error| {
                    let name = source.name.clone();
                    ChatTemplateError::Invalid {
                        name,
                        source: Box::new(error),
                    }
                })?;
        }
        let special = source::special_tokens(tokenizer)?;
        hash.update(format!("{special:?} {date:?}").as_bytes());
        Ok(Self {
            environment,
            name: source.name,
            special,
            marks_answers,
            has_tool_use,
            fingerprint: hash.digest(),
        })
    }

    /// Returns the name of the template: the path from which it was read.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a hash of the template and of all other inputs that affect the rendered text.
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Returns whether the template marks answers with `{% generation %}` blocks.
    pub fn marks_answers(&self) -> bool {
        self.marks_answers
    }

    /// Renders a conversation as text. If `add_generation_prompt` is true, the text ends with the header of the next
    /// answer of the assistant, for which the model then generates the text.
    ///
    /// # Errors
    ///
    /// [`ChatTemplateError::Render`] if the template fails to render the conversation; [`ChatTemplateError::Date`] if
    /// the template uses the date, but no date is set.
    pub fn render(
        &self,
        chat: &Chat<'_>,
        add_generation_prompt: bool,
    ) -> Result<RenderedChat, ChatTemplateError> {
        let none = ChatValue::from(());
        let mut context: Vec<(String, ChatValue)> = vec![];
        let special = self.special.iter();
        context.extend(special.map(|(key, token)| (key.clone(), ChatValue::from(&**token))));
        if let Some(variables) = chat.variables {
            for key in variables.try_iter().map_err(|error| self.failed(error))? {
                let value = variables
                    .get_item(&key)
                    .map_err(|error| self.failed(error))?;
                context.push((key.to_string(), value));
            }
        }
        let messages = ChatValue::from(chat.messages.to_vec());
        context.extend([
            ("messages".into(), messages),
            ("tools".into(), chat.tools.cloned().unwrap_or(none.clone())),
            ("documents".into(), none),
            ("add_generation_prompt".into(), add_generation_prompt.into()),
        ]);
        let with_tools = self.has_tool_use && chat.tools.is_some();
        let template = self
            .environment
            .get_template(NAMES[usize::from(with_tools)]);
        let context = ordered_map(context);
        let text = template.and_then(|template| template.render(context));
        Ok(without_marks(&text.map_err(|error| self.failed(error))?))
    }

    fn failed(&self, source: minijinja::Error) -> ChatTemplateError {
        let name = self.name.clone();
        let is_date = source.kind() == ErrorKind::UnknownFunction
            && source
                .detail()
                .is_some_and(|what| what.contains("strftime_now"));
        if is_date {
            ChatTemplateError::Date { name }
        } else {
            ChatTemplateError::Render {
                name,
                source: Box::new(source),
            }
        }
    }
}

/// Removes the marks around answers, and returns the ranges of the answers.
fn without_marks(marked: &str) -> RenderedChat {
    let mut rendered = RenderedChat::default();
    let mut begins = vec![];
    for character in marked.chars() {
        let at = rendered.text.len();
        match character {
            ANSWER_BEGINS => begins.push(at),
            ANSWER_ENDS => rendered.answers.extend(begins.pop().map(|begin| begin..at)),
            character => rendered.text.push(character),
        }
    }
    rendered.answers.sort_by_key(|answer| answer.start);
    rendered
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

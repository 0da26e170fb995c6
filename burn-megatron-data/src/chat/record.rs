//! Parses a line as a conversation.

use minijinja::value::ValueKind;
use serde::Deserialize;

use super::error::ChatLineError;
use super::tools;
use crate::tokenizer::chat::{ChatValue, JsonValue, ordered_map};

/// The roles of messages.
pub(super) const ROLES: [&str; 6] = [
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];

/// The role of the messages with answers.
pub(super) const ASSISTANT: &str = "assistant";

/// The role names of ShareGPT's `conversations`, and the corresponding roles.
const SHARE_GPT: [(&str, &str); 4] = [
    ("human", "user"),
    ("gpt", ASSISTANT),
    ("observation", "tool"),
    ("function_call", ASSISTANT),
];

/// The keys for the reasoning of a message. Templates read the first key.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A conversation.
#[derive(Debug)]
pub(super) struct Conversation {
    pub messages: Vec<ChatValue>,
    /// The index of the first message whose answers are trained. Earlier messages are the prompt.
    pub first_trained: usize,
    /// The prompt and the answer, if they are texts that need no template.
    pub texts: Option<[String; 2]>,
    /// The messages with call arguments as JSON text, and these texts, if there are any.
    pub with_argument_texts: Option<(Vec<ChatValue>, Vec<String>)>,
    pub tools: Option<ChatValue>,
    pub variables: Option<ChatValue>,
}

/// The keys of a line; others are ignored.
#[derive(Deserialize)]
struct Record {
    prompt: Option<JsonValue>,
    completion: Option<JsonValue>,
    answer: Option<JsonValue>,
    messages: Option<JsonValue>,
    conversations: Option<JsonValue>,
    tools: Option<JsonValue>,
    chat_template_kwargs: Option<JsonValue>,
}

impl Conversation {
    /// Parses a line of JSON.
    ///
    /// # Errors
    ///
    /// [`ChatLineError`].
    pub fn parse(line: &str) -> Result<Self, ChatLineError> {
        let lower = || line.to_ascii_lowercase();
        let marks = ['\u{fdd0}', '\u{fdd1}'];
        let has_escape = line.contains("\\u")
            && ["\\ufdd0", "\\ufdd1"]
                .iter()
                .any(|mark| lower().contains(mark));
        if line.contains(marks) || has_escape {
            return Err(ChatLineError::Noncharacter);
        }
        if !line.trim_start().starts_with('{') {
            let value: serde_json::Value = serde_json::from_str(line)?;
            let is = if value.is_array() {
                "a list"
            } else {
                "a value"
            };
            return Err(ChatLineError::Form(is.into()));
        }
        let record: Record = serde_json::from_str(line)?;
        let (messages, first_trained, texts) = match &record {
            Record {
                messages: Some(messages),
                ..
            } => (list(&messages.0, "messages")?, 0, None),
            Record {
                conversations: Some(turns),
                ..
            } => {
                let turns = list(&turns.0, "conversations")?.into_iter();
                (turns.map(of_share_gpt).collect(), 0, None)
            }
            Record {
                prompt: Some(prompt),
                completion,
                answer,
                ..
            } => {
                let found = match (completion, answer) {
                    (Some(completion), _) => Some(("completion", completion)),
                    (None, answer) => answer.as_ref().map(|answer| ("answer", answer)),
                };
                let (key, answer) = found.ok_or_else(|| form(line))?;
                let (before, prompt) = turns(&prompt.0, "prompt", "user")?;
                let (after, answer) = turns(&answer.0, key, ASSISTANT)?;
                let first = before.len();
                (
                    [before, after].concat(),
                    first,
                    prompt.zip(answer).map(<[String; 2]>::from),
                )
            }
            _ => return Err(form(line)),
        };
        let given: Vec<_> = messages.iter().map(normalized).collect();
        let with_calls = |mut texts: Option<&mut Vec<String>>| {
            let given = given.iter().enumerate();
            let each =
                given.map(|(at, message)| tools::with_calls(message, at + 1, texts.as_deref_mut()));
            each.collect::<Result<Vec<_>, _>>()
        };
        let mut argument_texts = vec![];
        let messages_with_texts = with_calls(Some(&mut argument_texts))?;
        let messages = with_calls(None)?;
        check(&messages, first_trained)?;
        Ok(Self {
            messages,
            first_trained,
            texts,
            with_argument_texts: (!argument_texts.is_empty())
                .then_some((messages_with_texts, argument_texts)),
            tools: optional(record.tools, tools::tools)?,
            variables: optional(record.chat_template_kwargs, tools::variables)?,
        })
    }

    /// Returns the messages of the assistant.
    pub fn assistant(&self) -> impl DoubleEndedIterator<Item = usize> {
        (0..self.messages.len()).filter(|at| is_answer(&self.messages[*at]))
    }

    /// Returns the index of the first message whose content is a list with a text that the rendered conversation lacks.
    /// Some templates write nothing for a list. Only the last line of each text is searched, because templates may cut
    /// off the beginning of a text.
    pub fn left_out(&self, rendered: &str) -> Option<usize> {
        let is_written = |part: ChatValue| {
            let text = part.get_attr("text").unwrap_or_default();
            let last = text.as_str().and_then(|text| text.trim().lines().last());
            last.is_none_or(|line| rendered.contains(line.trim()))
        };
        self.messages.iter().position(|message| {
            let content = message.get_attr("content").unwrap_or_default();
            let is_list = content.kind() == ValueKind::Seq;
            let mut parts = content.try_iter().into_iter().flatten();
            is_list && !parts.all(is_written)
        })
    }

    /// Returns the indices of the assistant's messages that are trained.
    pub fn answers(&self) -> impl DoubleEndedIterator<Item = usize> {
        self.assistant().filter(|at| *at >= self.first_trained)
    }
}

/// Removes keys with null values from an optional value, and parses the result with a function.
fn optional(
    value: Option<JsonValue>,
    read: impl Fn(&ChatValue) -> Result<Option<ChatValue>, ChatLineError>,
) -> Result<Option<ChatValue>, ChatLineError> {
    value.map_or(Ok(None), |value| read(&tools::without_nulls(&value.0)))
}

/// Returns an error that lists the keys of a line.
fn form(line: &str) -> ChatLineError {
    let object: Result<serde_json::Map<String, serde_json::Value>, _> = serde_json::from_str(line);
    let keys: Vec<_> = object
        .unwrap_or_default()
        .keys()
        .map(|key| format!("`{key}`"))
        .collect();
    ChatLineError::Form(if keys.is_empty() {
        "no key".into()
    } else {
        keys.join(", ")
    })
}

fn list(value: &ChatValue, what: &str) -> Result<Vec<ChatValue>, ChatLineError> {
    let expected = "a list of messages, {\"role\": .., \"content\": ..}";
    let invalid = || ChatLineError::Type {
        what: what.into(),
        expected,
    };
    if value.kind() != ValueKind::Seq {
        return Err(invalid());
    }
    let items: Vec<_> = value.try_iter().map_err(|_| invalid())?.collect();
    match items.iter().all(|item| item.kind() == ValueKind::Map) && !items.is_empty() {
        true => Ok(items),
        false => Err(invalid()),
    }
}

/// Returns the messages of a value: a text becomes one message of this role, and a list is returned as it is.
fn turns(
    value: &ChatValue,
    what: &str,
    role: &str,
) -> Result<(Vec<ChatValue>, Option<String>), ChatLineError> {
    match value.as_str() {
        Some(text) => {
            let message = ordered_map([("role", role.into()), ("content", text.into())]);
            Ok((vec![message], Some(text.into())))
        }
        None if value.kind() == ValueKind::Seq => Ok((list(value, what)?, None)),
        None => Err(ChatLineError::Type {
            what: what.into(),
            expected: "a text, or a list of messages",
        }),
    }
}

/// Converts `{"from": "human", "value": ".."}` to the keys of the other formats.
fn of_share_gpt(turn: ChatValue) -> ChatValue {
    let of = |key: &str| {
        turn.get_attr(key)
            .ok()
            .filter(|value| !value.is_undefined())
    };
    let Some(from) = of("from") else {
        return turn;
    };
    let role = SHARE_GPT
        .iter()
        .find(|(name, _)| from.as_str() == Some(name));
    let role = role.map_or(from.clone(), |(_, role)| ChatValue::from(*role));
    ordered_map([("role", role), ("content", of("value").unwrap_or_default())])
}

/// Returns a message as `transformers` passes it to a template. Keys with null values are removed, and the reasoning
/// has the key that templates read. TRL removes keys with null values at any depth.
fn normalized(turn: &ChatValue) -> ChatValue {
    let turn = &tools::without_nulls(turn);
    let keys = turn.try_iter().into_iter().flatten();
    let pairs = keys.filter_map(|key| Some((key.to_string(), turn.get_item(&key).ok()?)));
    let mut pairs: Vec<_> = pairs.collect();
    let reasoning = REASONING
        .iter()
        .find_map(|name| pairs.iter().find(|(key, _)| key == name));
    if let Some(reasoning) = reasoning.map(|(_, value)| value.clone()) {
        for (name, replaces) in [("thinking", false), ("reasoning_content", true)] {
            match pairs.iter_mut().find(|(key, _)| key == name) {
                Some((_, value)) if replaces => *value = reasoning.clone(),
                Some(_) => {}
                None => pairs.push((name.into(), reasoning.clone())),
            }
        }
    }
    ordered_map(pairs)
}

fn role(message: &ChatValue) -> Option<String> {
    Some(message.get_attr("role").ok()?.as_str()?.into())
}

fn is_answer(message: &ChatValue) -> bool {
    role(message).as_deref() == Some(ASSISTANT)
}

/// Checks the roles and the answers.
fn check(messages: &[ChatValue], first_trained: usize) -> Result<(), ChatLineError> {
    for (at, message) in messages.iter().enumerate() {
        let number = at + 1;
        let invalid = |key, expected| ChatLineError::Type {
            what: format!("{key} of message {number}"),
            expected,
        };
        let role = role(message).ok_or_else(|| invalid("role", "a text"))?;
        if !ROLES.contains(&&*role) {
            return Err(ChatLineError::Role {
                message: number,
                role,
            });
        }
        let of = |key| message.get_attr(key).unwrap_or_default();
        let (content, calls) = (of("content"), of("tool_calls").is_true());
        let is_text = content.as_str().is_some();
        if !is_text && content.kind() != ValueKind::Seq && !calls {
            return Err(invalid("content", "a text, or a list of parts"));
        }
        let mut parts = content.try_iter().into_iter().flatten();
        let is_part = |part: ChatValue| {
            part.get_attr("type")
                .is_ok_and(|kind| kind.as_str().is_some())
        };
        if !is_text && !parts.all(is_part) {
            return Err(invalid(
                "content",
                "a text, or a list of parts, {\"type\": .., ..}",
            ));
        }
        let is_empty = content
            .as_str()
            .map_or(!content.is_true(), |text| text.trim().is_empty());
        if role == ASSISTANT && at >= first_trained && is_empty && !calls {
            return Err(ChatLineError::EmptyAnswer { message: number });
        }
    }
    match messages[first_trained.min(messages.len())..]
        .iter()
        .any(is_answer)
    {
        true => Ok(()),
        false => Err(ChatLineError::NoAnswer),
    }
}

/// Returns messages as a template receives them.
#[cfg(test)]
pub(crate) fn messages(list: &ChatValue) -> Vec<ChatValue> {
    list.try_iter()
        .unwrap()
        .map(|turn| normalized(&turn))
        .collect()
}

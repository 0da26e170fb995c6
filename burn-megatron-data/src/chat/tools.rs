//! Tools and tool calls. Files may store them as JSON text, because a column of Arrow has a single type.

use minijinja::value::ValueKind;

use super::error::ChatLineError;
use crate::tokenizer::chat::{ChatValue, JsonValue, ordered_map};

/// The keys of a message, or of a call, whose values may be JSON text.
const CALLS: &str = "tool_calls";
const FUNCTION: &str = "function";
const ARGUMENTS: &str = "arguments";

/// Returns the tools of a conversation: a list of schemas, or `None` for an empty value. The list, or each schema, may be
/// JSON text.
///
/// # Errors
///
/// [`ChatLineError`] for text that is not JSON, and for other types.
pub(super) fn tools(value: &ChatValue) -> Result<Option<ChatValue>, ChatLineError> {
    let value = parsed(value, "tools")?;
    if !value.is_true() {
        return Ok(None);
    }
    let expected = "a list of schemas, or its JSON text";
    Ok(Some(maps(&value, "tools", expected)?.into()))
}

/// Returns a map of variables, which may be JSON text; `None` for an empty value.
///
/// # Errors
///
/// [`ChatLineError`] for text that is not JSON, and for other types.
pub(super) fn variables(value: &ChatValue) -> Result<Option<ChatValue>, ChatLineError> {
    let what = "chat_template_kwargs";
    let value = parsed(value, what)?;
    match (value.is_true(), value.kind()) {
        (false, _) => Ok(None),
        (true, ValueKind::Map) => Ok(Some(value)),
        (true, _) => Err(invalid(what, "an object, or its JSON text")),
    }
}

/// Returns a message whose tool calls are a list of maps with arguments in a map. The calls and the arguments of each may be
/// JSON text. If `texts` is given, the texts of arguments are not parsed. They are also added to `texts`.
///
/// # Errors
///
/// [`ChatLineError`] for text that is not JSON, and for other types. It names the message by its `number`.
pub(super) fn with_calls(
    message: &ChatValue,
    number: usize,
    mut texts: Option<&mut Vec<String>>,
) -> Result<ChatValue, ChatLineError> {
    let calls = get(message, CALLS).filter(ChatValue::is_true);
    let Some(calls) = calls else {
        return Ok(message.clone());
    };
    let what = format!("{CALLS} of message {number}");
    let calls = parsed(&calls, &what)?;
    let calls = maps(&calls, &what, "a list of calls, or its JSON text")?;
    let mut with_arguments =
        |function: &ChatValue| with_arguments(function, number, texts.as_deref_mut());
    let calls = calls.iter().map(|call| match get(call, FUNCTION) {
        Some(function) => Ok(with(call, FUNCTION, with_arguments(&function)?)),
        None => with_arguments(call),
    });
    let calls = calls.collect::<Result<Vec<_>, ChatLineError>>()?;
    Ok(with(message, CALLS, calls.into()))
}

/// Returns whether a rendered conversation has these texts of arguments unchanged, and not as JSON strings with quotes.
pub(super) fn are_written(texts: &[String], rendered: &str) -> bool {
    texts.iter().all(|text| {
        let quoted = serde_json::Value::from(&text[..]).to_string();
        !text.trim().is_empty() && rendered.contains(text) && !rendered.contains(&quoted)
    })
}

/// Returns the function of a call with its arguments in a map, or as text if `texts` collects the arguments.
fn with_arguments(
    function: &ChatValue,
    number: usize,
    texts: Option<&mut Vec<String>>,
) -> Result<ChatValue, ChatLineError> {
    let what = format!("{ARGUMENTS} of a call in message {number}");
    let function = parsed(function, &what)?;
    let Some(arguments) = get(&function, ARGUMENTS) else {
        return Ok(function);
    };
    if let (Some(text), Some(texts)) = (arguments.as_str(), texts) {
        texts.push(text.into());
        return Ok(function);
    }
    let is_empty = arguments
        .as_str()
        .is_some_and(|text| text.trim().is_empty());
    let arguments = match is_empty {
        true => ordered_map::<&str>([]),
        false => parsed(&arguments, &what)?,
    };
    match arguments.kind() {
        ValueKind::Map => Ok(with(&function, ARGUMENTS, arguments)),
        _ => Err(invalid(&what, "an object, or its JSON text")),
    }
}

/// Returns a value without keys that have null values, at any depth. A table of Arrow has each key in all rows.
pub(super) fn without_nulls(value: &ChatValue) -> ChatValue {
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::Map => ordered_map(items().filter_map(|key| {
            let value = value.get_item(&key).ok().filter(|value| !value.is_none())?;
            Some((key.to_string(), without_nulls(&value)))
        })),
        ValueKind::Seq => items().map(|item| without_nulls(&item)).collect(),
        _ => value.clone(),
    }
}

/// Returns the value of a JSON text. Other values are returned unchanged.
fn parsed(value: &ChatValue, what: &str) -> Result<ChatValue, ChatLineError> {
    match value.as_str() {
        Some(text) if !text.trim().is_empty() => {
            let parsed = serde_json::from_str::<JsonValue>(text);
            let parsed = parsed.map_err(|source| ChatLineError::JsonText {
                what: what.into(),
                source,
            })?;
            Ok(without_nulls(&parsed.0))
        }
        Some(_) => Ok(ChatValue::from(())),
        None => Ok(value.clone()),
    }
}

/// Returns the items of a list. Each item is a map or the JSON text of a map.
fn maps(
    value: &ChatValue,
    what: &str,
    expected: &'static str,
) -> Result<Vec<ChatValue>, ChatLineError> {
    if value.kind() != ValueKind::Seq {
        return Err(invalid(what, expected));
    }
    let items = value.try_iter().into_iter().flatten();
    let items = items.map(|item| parsed(&item, what));
    let items = items.collect::<Result<Vec<_>, _>>()?;
    match items.iter().all(|item| item.kind() == ValueKind::Map) {
        true => Ok(items),
        false => Err(invalid(what, expected)),
    }
}

fn get(map: &ChatValue, key: &str) -> Option<ChatValue> {
    let value = map.get_attr(key).ok()?;
    (!value.is_undefined() && !value.is_none()).then_some(value)
}

/// Returns a map with a new value for a key.
fn with(map: &ChatValue, key: &str, value: ChatValue) -> ChatValue {
    let keys = map.try_iter().into_iter().flatten();
    let own = keys.filter_map(|key| Some((key.to_string(), map.get_item(&key).ok()?)));
    ordered_map(own.chain([(key.to_string(), value)]))
}

fn invalid(what: &str, expected: &'static str) -> ChatLineError {
    ChatLineError::Type {
        what: what.into(),
        expected,
    }
}

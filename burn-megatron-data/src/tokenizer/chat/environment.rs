//! The Jinja environment of chat templates.

use chrono::NaiveDate;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::json;

/// The marks before and after an answer while a template is rendered. They are Unicode noncharacters, which do not
/// occur in text.
pub(in super::super) const ANSWER_BEGINS: char = '\u{fdd0}';
pub(in super::super) const ANSWER_ENDS: char = '\u{fdd1}';

/// The function that `{% generation %}` calls.
const GENERATION: &str = "__generation";

/// Creates an environment like the environment of `transformers`.
pub(super) fn environment(date: Option<NaiveDate>) -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    environment.set_syntax(syntax.expect("the delimiters are the usual ones"));
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.set_formatter(print);
    environment.add_filter("tojson", json::tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function(GENERATION, generation);
    if let Some(date) = date {
        environment.add_function("strftime_now", move |format: &str| strftime(date, format));
    }
    environment
}

/// Prints a value like Python. Lists and maps are rejected, because Python prints them as text that is not JSON.
fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.write_str("None").map_err(Error::from),
        ValueKind::Bool if value.is_true() => out.write_str("True").map_err(Error::from),
        ValueKind::Bool => out.write_str("False").map_err(Error::from),
        kind @ (ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) => {
            let what = format!("it prints a {kind}: expected text, such as the output of `tojson`");
            Err(Error::new(ErrorKind::InvalidOperation, what))
        }
        _ => minijinja::escape_formatter(out, state, value),
    }
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_string()))
}

/// Returns the text of a `{% generation %}` block between the marks.
fn generation(state: &mut State, kwargs: Kwargs) -> Result<Value, Error> {
    let text = kwargs.get::<Value>("caller")?.call(state, &[])?;
    let text = text.as_str().unwrap_or_default();
    Ok(format!("{ANSWER_BEGINS}{text}{ANSWER_ENDS}").into())
}

fn strftime(date: NaiveDate, format: &str) -> Result<String, Error> {
    use std::fmt::Write;
    let mut text = String::new();
    let midnight = date.and_time(Default::default());
    match write!(text, "{}", midnight.format(format)) {
        Ok(()) => Ok(text),
        Err(_) => {
            let what = format!("strftime_now: invalid format {format:?}");
            Err(Error::new(ErrorKind::InvalidOperation, what))
        }
    }
}

/// Replaces `{% generation %}` blocks of a template with function calls, like `transformers`. Also returns whether
/// there is a block.
pub(super) fn with_calls(source: &str) -> (String, bool) {
    let (mut text, mut left, mut marks) = (String::new(), source, false);
    while let Some(begin) = left.find("{%") {
        let Some(end) = left[begin..].find("%}") else {
            break;
        };
        let (tag, end) = (&left[begin + 2..begin + end], begin + end);
        let name = tag.trim_matches(['-', '+']).trim();
        let call = match name {
            "generation" => Some(format!("call {GENERATION}()")),
            "endgeneration" => Some("endcall".into()),
            _ => None,
        };
        text += &left[..begin + 2];
        match call {
            Some(call) => {
                marks = true;
                text += &tag.replace(name, &format!(" {call} "))
            }
            None => text += tag,
        }
        text += "%}";
        left = &left[end + 2..];
    }
    (text + left, marks)
}

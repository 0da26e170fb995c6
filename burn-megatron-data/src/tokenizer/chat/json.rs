//! The template filter `tojson`, which writes JSON like Python.

use std::io::{self, Write};

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// Formats a value like the filter of `transformers`: `json.dumps(x, ensure_ascii=False, indent=None, separators=None,
/// sort_keys=False)`.
pub(super) fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = kwargs.get::<Option<usize>>("indent")?;
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    let [item, key] = match separators.as_deref() {
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => {
            let what = "tojson: expected two separators";
            return Err(Error::new(ErrorKind::InvalidOperation, what));
        }
        // With indentation, lines end without a space.
        None if indent.is_some() => [",".into(), ": ".into()],
        None => [", ".into(), ": ".into()],
    };
    let python = Python {
        item,
        key,
        indent,
        depth: 0,
        is_empty: true,
    };
    let mut written = vec![];
    let mut serializer = Serializer::with_formatter(&mut written, python);
    let sorted = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let done = if sorted {
        // Maps of serde_json are sorted by key.
        serde_json::to_value(value).and_then(|value| value.serialize(&mut serializer))
    } else {
        value.serialize(&mut serializer)
    };
    let invalid = |error: String| Error::new(ErrorKind::BadSerialization, error);
    done.map_err(|error| invalid(error.to_string()))?;
    let mut text = String::from_utf8(written).map_err(|error| invalid(error.to_string()))?;
    if kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false) {
        text = ascii(&text);
    }
    kwargs.assert_all_used()?;
    Ok(Value::from(text))
}

/// Escapes non-ASCII characters and DEL in strings.
fn ascii(text: &str) -> String {
    let escaped = |character: char| {
        let mut units = [0; 2];
        let units = character.encode_utf16(&mut units).iter();
        units
            .map(|unit| format!("\\u{unit:04x}"))
            .collect::<String>()
    };
    let each = text.chars().map(
        |character| match character.is_ascii() && character != '\u{7f}' {
            true => character.to_string(),
            false => escaped(character),
        },
    );
    each.collect()
}

/// The layout of `json.dumps`.
struct Python {
    /// The separator between two items.
    item: String,
    /// The separator between a key and its value.
    key: String,
    indent: Option<usize>,
    depth: usize,
    /// Whether the array or object has no item yet.
    is_empty: bool,
}

impl Python {
    fn line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        match self.indent {
            Some(indent) => write!(writer, "\n{:1$}", "", indent * self.depth),
            None => Ok(()),
        }
    }

    fn begin<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.is_empty = true;
        writer.write_all(bracket)
    }

    fn end<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.is_empty {
            self.line(writer)?;
        }
        self.is_empty = false;
        writer.write_all(bracket)
    }

    fn next<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.line(writer)
    }
}

impl Formatter for Python {
    /// Writes the shortest digits, like Rust and Python. Python writes an exponent with a sign and at least two digits.
    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        let text = serde_json::Number::from_f64(value).map(|number| number.to_string());
        let text = text.unwrap_or_else(|| value.to_string());
        match text.split_once('e') {
            None => writer.write_all(text.as_bytes()),
            Some((digits, exponent)) => {
                let digits = digits.trim_end_matches(".0");
                let exponent: i32 = exponent.parse().map_err(io::Error::other)?;
                let sign = if exponent < 0 { '-' } else { '+' };
                write!(writer, "{digits}e{sign}{:02}", exponent.abs())
            }
        }
    }

    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }
}

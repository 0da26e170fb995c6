//! Texts of a JSON object.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::error::BadDocument;

/// The byte order mark that may begin a file.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Returns the text under each key of a JSON object. If a key is repeated, the last value is used.
///
/// # Errors
/// Returns [`BadDocument::Json`], [`BadDocument::MissingKey`] or [`BadDocument::NoText`].
pub fn texts(json: &[u8], keys: &[String]) -> Result<Vec<String>, BadDocument> {
    let json = json.strip_prefix(BYTE_ORDER_MARK).unwrap_or(json);
    let mut reader = serde_json::Deserializer::from_slice(json);
    let values = Keys(keys).deserialize(&mut reader);
    let values = values.and_then(|values| reader.end().map(|()| values));
    let values = values.map_err(BadDocument::Json)?;
    let texts = keys.iter().zip(values).map(|(key, value)| match value {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(BadDocument::NoText(key.clone())),
        None => Err(BadDocument::MissingKey {
            key: key.clone(),
            keys: self::keys(json),
        }),
    });
    texts.collect()
}

/// Returns the keys of a JSON object, up to the first syntax error.
pub fn keys(json: &[u8]) -> Vec<String> {
    let mut keys = vec![];
    let json = json.strip_prefix(BYTE_ORDER_MARK).unwrap_or(json);
    // Keys before an error are kept.
    let _ = Names(&mut keys).deserialize(&mut serde_json::Deserializer::from_slice(json));
    keys
}

/// Collects the keys of an object.
struct Names<'a>(&'a mut Vec<String>);

impl<'de> DeserializeSeed<'de> for Names<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Names<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key()? {
            self.0.push(key);
            map.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }
}

/// Deserializes the values of some keys, and ignores the others.
struct Keys<'a>(&'a [String]);

impl<'de> DeserializeSeed<'de> for Keys<'_> {
    type Value = Vec<Option<Value>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Keys<'_> {
    type Value = Vec<Option<Value>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut values = vec![None; self.0.len()];
        while let Some(key) = map.next_key::<String>()? {
            match self.0.iter().position(|wanted| *wanted == key) {
                Some(at) => values[at] = Some(map.next_value()?),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn of(json: &str, keys: &[&str]) -> Result<Vec<String>, String> {
        let keys: Vec<_> = keys.iter().map(ToString::to_string).collect();
        texts(json.as_bytes(), &keys).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_are_found_in_any_order() {
        let json = r#" {"b": "y", "other": {"a": [1, null, "z"]}, "a": "x\n\u00e9\ud83e\uddff"} "#;
        assert_eq!(of(json, &["a", "b"]).unwrap(), ["x\né🧿", "y"]);
        assert_eq!(of(r#"{"a": "1", "a": "2"}"#, &["a"]).unwrap(), ["2"]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |json| of(json, &["text"]).unwrap_err();
        assert_snapshot!(
            error(r#"{"a": "x"}"#),
            @"the object has no `text`, only `a` (see --json-key)"
        );
        assert_snapshot!(
            error(r#"{"a": {"text": "x"}, "b": 1}"#),
            @"the object has no `text`, but `a`, `b` (see --json-key)"
        );
        assert_snapshot!(error("{}"), @"the object has no `text`");
        assert_snapshot!(error(r#"{"text": null}"#), @"the value of `text` is not a string");
        assert_eq!(
            error(r#"{"text": ["x"]}"#),
            "the value of `text` is not a string"
        );
        for json in [
            r#"{"text": "x"#,
            r#"{"text": "x"} y"#,
            r#"["text"]"#,
            "3",
            "\"\\ud800\"",
        ] {
            assert!(error(json).starts_with("not a JSON object: "), "{json}");
        }
        let deep = format!("{{\"text\": {}", "[".repeat(100_000));
        assert!(error(&deep).contains("recursion limit"), "{}", error(&deep));
    }
}

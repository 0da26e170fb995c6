//! JSON schema of a type, from which its settings are read.

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value as Json};

/// JSON object of a schema.
pub type Schema = Map<String, Json>;

/// Returns the schema of a type as one tree, without references.
pub fn schema_of<T: JsonSchema>() -> Json {
    let settings = SchemaSettings::default().with(|settings| settings.inline_subschemas = true);
    settings.into_generator().into_root_schema_for::<T>().into()
}

/// Returns the alternatives of a schema. A value matches one of them.
pub fn branches(schema: &Schema) -> impl Iterator<Item = &Json> {
    let of = |key: &str| schema.get(key).and_then(Json::as_array);
    let all = [of("oneOf"), of("anyOf")];
    all.into_iter().flatten().flatten()
}

/// Returns the name and the settings of a variant that is written as a table with its name as the only key.
pub fn variant(branch: &Json) -> Option<(&String, &Json)> {
    let keys = branch.get("properties")?.as_object()?;
    let required = branch.get("required")?.as_array()?;
    let mut keys = keys.iter();
    match (keys.next(), keys.next(), &required[..]) {
        (Some((name, inner)), None, [only]) if only == name && inner.get("const").is_none() => {
            Some((name, inner))
        }
        _ => None,
    }
}

/// Returns a doc comment as plain text: without the targets of links, and with spaces instead of line breaks.
pub fn plain(doc: &str) -> String {
    let (mut text, mut rest) = (String::new(), doc);
    while let Some(start) = rest.find('[') {
        let (before, link) = rest.split_at(start);
        text += before;
        let end = link.find(']').map_or(link.len(), |end| end + 1);
        let (label, after) = link.split_at(end);
        let target = after
            .strip_prefix('(')
            .and_then(|target| target.split_once(')'));
        let is_name = label.starts_with("[`");
        match target {
            Some((_, after)) => (text, rest) = (text + label.trim_matches(['[', ']']), after),
            None if is_name => (text, rest) = (text + label.trim_matches(['[', ']']), after),
            None => (text, rest) = (text + label, after),
        }
    }
    text += rest;
    // Flags and recipe keys use this spelling.
    let text = text.replace("`None`", "`none`");
    let paragraphs = text.split("\n\n").map(|paragraph| {
        let words: Vec<_> = paragraph.split_whitespace().collect();
        words.join(" ")
    });
    // Code examples are only for the documentation of the library.
    let paragraphs = paragraphs.take_while(|paragraph| !paragraph.starts_with("```"));
    paragraphs.collect::<Vec<_>>().join("\n\n")
}

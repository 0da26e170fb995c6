use serde::Deserialize;
use serde_json::{Map, Value};

use super::*;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");

/// Returns the conversations that `transformers` has rendered, from `make.py`.
fn cases() -> Value {
    let text = std::fs::read(format!("{FIXTURES}/chat/cases.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn tokenizer() -> Tokenizer {
    Tokenizer::open(format!("{FIXTURES}/tokenizer/byte_bpe").as_ref()).unwrap()
}

/// The keys keep the order in the file.
#[derive(Deserialize)]
struct Chats {
    chats: JsonValue,
    json: Vec<JsonValue>,
}

fn ordered() -> Chats {
    let text = std::fs::read(format!("{FIXTURES}/chat/cases.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// Returns the value of a key, or `None` if the key does not exist.
fn of(value: &ChatValue, key: &str) -> Option<ChatValue> {
    Some(value.get_attr(key).unwrap()).filter(|value| !value.is_undefined())
}

#[test]
fn texts_and_marks_are_those_of_transformers() {
    let (tokenizer, chats) = (tokenizer(), ordered().chats.0);
    let date = NaiveDate::from_ymd_opt(2025, 1, 31);
    let cases = cases();
    let (mut texts, mut errors, mut masks) = (0, 0, 0);
    for (file, cases) in cases["templates"].as_object().unwrap() {
        let path = format!("{FIXTURES}/chat/{file}");
        let template = ChatTemplate::read(path.as_ref(), &tokenizer, date).unwrap();
        for (name, case) in cases.as_object().unwrap() {
            let what = format!("{file}, {name}");
            let chat = of(&chats, name).unwrap();
            let messages = crate::chat_messages(&of(&chat, "messages").unwrap());
            let (tools, variables) = (of(&chat, "tools"), of(&chat, "variables"));
            let chat = Chat {
                messages: &messages,
                tools: tools.as_ref(),
                variables: variables.as_ref(),
            };
            let rendered = template.render(&chat, false);
            if let Some(error) = case["error"].as_str() {
                let found = rendered.expect_err(&what).to_string();
                // Errors that a template raises are returned.
                let own = ["System role", "roles must"]
                    .iter()
                    .any(|own| error.starts_with(own));
                assert!(!own || found.contains(error), "{what}: {found}");
                errors += 1;
                continue;
            }
            let rendered = rendered.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(rendered.text, case["text"], "{what}");
            let prompted = template.render(&chat, true).unwrap();
            assert_eq!(prompted.text, case["prompted"], "{what}");
            texts += 1;
            let Some(mask) = case["mask"].as_array() else {
                assert!(rendered.answers.is_empty(), "{what}");
                continue;
            };
            let tokens = tokenizer
                .encode_with_offsets(&rendered.text, false)
                .unwrap();
            let ids: Vec<_> = tokens.iter().map(|(id, _)| *id).collect();
            assert_eq!(Value::from(ids), case["tokens"], "{what}");
            let marked = crate::chat_mask(tokens, &rendered.answers);
            let marked = marked
                .into_iter()
                .map(|is_answer| Value::from(u8::from(is_answer)));
            assert_eq!(&marked.collect::<Vec<_>>(), mask, "{what}");
            masks += 1;
        }
    }
    assert!(
        texts > 30 && errors > 3 && masks > 4,
        "{texts} {errors} {masks}"
    );
}

#[test]
fn json_is_that_of_python() {
    let mut environment = environment::environment(None);
    for JsonValue(case) in ordered().json {
        let options = of(&case, "options").unwrap();
        let options = options.try_iter().unwrap().map(|key| {
            let value = options.get_item(&key).unwrap();
            format!("{key}={}", serde_json::to_string(&value).unwrap())
        });
        let options: Vec<_> = options.collect();
        let template = format!("{{{{ value | tojson({}) }}}}", options.join(", "));
        environment.add_template_owned("case", template).unwrap();
        let value = of(&case, "value").unwrap_or(ChatValue::from(()));
        let text = environment.get_template("case").unwrap();
        let text = text.render(minijinja::context!(value)).unwrap();
        assert_eq!(
            Some(&*text),
            of(&case, "text").unwrap().as_str(),
            "{options:?}"
        );
    }
}

#[test]
fn a_template_is_found_and_its_date_is_set() {
    let folder = tempfile::tempdir().unwrap();
    let write = |file: &str, text: &str| std::fs::write(folder.path().join(file), text).unwrap();
    let tokenizer = format!("{FIXTURES}/tokenizer/byte_bpe/tokenizer.json");
    write(
        "tokenizer.json",
        &std::fs::read_to_string(tokenizer).unwrap(),
    );
    let config = |template: Value| {
        let mut config = Map::new();
        config.insert(
            "eos_token".into(),
            serde_json::json!({"content": "<|endoftext|>"}),
        );
        config.insert("chat_template".into(), template);
        write("tokenizer_config.json", &Value::from(config).to_string());
    };
    let messages = [ordered_map([("role", "user".into())])];
    let tool = ChatValue::from(vec!["tool"]);
    let rendered = |date: Option<NaiveDate>, tools: Option<&ChatValue>| {
        let tokenizer = Tokenizer::open(folder.path()).unwrap();
        let template = ChatTemplate::of(&tokenizer, date).map_err(|error| error.to_string())?;
        let Some(template) = template else {
            return Ok("none".into());
        };
        let chat = Chat {
            messages: &messages,
            tools,
            variables: None,
        };
        let rendered = template
            .render(&chat, false)
            .map_err(|error| error.to_string())?;
        Ok::<_, String>(rendered.text)
    };
    config(Value::Null);
    assert_eq!(rendered(None, None).unwrap(), "none");
    config("{{ messages[0].role }}{{ eos_token }}{{ bos_token }}".into());
    assert_eq!(rendered(None, None).unwrap(), "user<|endoftext|>");
    let named =
        |name: &str, template: &str| serde_json::json!({"name": name, "template": template});
    config(
        vec![
            named("default", "a"),
            named("tool_use", "b"),
            named("rag", "c"),
        ]
        .into(),
    );
    assert_eq!(rendered(None, None).unwrap(), "a");
    assert_eq!(rendered(None, Some(&tool)).unwrap(), "b");
    config(vec![named("rag", "c")].into());
    assert!(
        rendered(None, None)
            .unwrap_err()
            .contains("the name \"default\"")
    );
    config(3.into());
    assert!(
        rendered(None, None)
            .unwrap_err()
            .contains("expected a string")
    );
    // The template file has precedence.
    write("chat_template.jinja", "{{ strftime_now('%d %B %Y') }}");
    let date = NaiveDate::from_ymd_opt(2025, 1, 31);
    assert_eq!(rendered(date, None).unwrap(), "31 January 2025");
    assert!(
        rendered(None, None)
            .unwrap_err()
            .contains("set data.chat.date")
    );
    write("chat_template.jinja", "{% for x in y %}");
    let error = rendered(date, None).unwrap_err();
    assert!(
        error.contains("chat_template.jinja is not valid"),
        "{error}"
    );
    write("chat_template.jinja", "{{ messages }}");
    let error = rendered(date, None).unwrap_err();
    assert!(error.contains("it prints a sequence"), "{error}");
}

use super::*;
use burn_megatron_test_support::TestFolder;

mod rows;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/chat");

fn template(name: &str) -> ChatTemplate {
    let path = format!("{FIXTURES}/{name}.jinja");
    ChatTemplate::read(path.as_ref(), &Tokenizer::bytes(), None).unwrap()
}

/// Returns the text, and the parts of the text that have a loss joined with `|`.
fn trained(
    line: &str,
    template: Option<&ChatTemplate>,
    loss: TrainedTokens,
) -> Result<[String; 2], String> {
    let tokenizer = Tokenizer::bytes();
    let worker = ChatTokenizer {
        tokenizer: &tokenizer,
        template,
        loss,
    };
    let tokens = worker
        .line(line, &tokenizer)
        .map_err(|error| error.to_string())?;
    let mut parts = vec![];
    for (token, is_answer) in tokens.tokens.iter().zip(&tokens.is_answer) {
        match (*is_answer, parts.last()) {
            (true, _) => parts.push(*token as u8),
            (false, Some(b'|') | None) => {}
            (false, Some(_)) => parts.push(b'|'),
        }
    }
    let all: Vec<u8> = tokens.tokens.iter().map(|token| *token as u8).collect();
    Ok([all, parts].map(|bytes| String::from_utf8(bytes).unwrap()))
}

const TWO_TURNS: &str = r#"{"messages": [{"role": "user", "content": "Hé"}, {"role": "assistant", "content": "A1", "tool_calls": null},
    {"role": "user", "content": "Q2"}, {"role": "assistant", "content": "A2"}], "id": 7}"#;

#[test]
fn answers_have_a_loss_and_prompts_have_none() {
    let chatml = template("chatml");
    let of = |line: &str, loss| trained(line, Some(&chatml), loss).unwrap();
    let turn = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na b<|im_end|>\n";
    for line in [
        r#"{"prompt": "q", "completion": "a b"}"#,
        r#"{"prompt": "q", "answer": "a b", "other": [1]}"#,
        r#"{"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a b"}]}"#,
        r#"{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b"}]}"#,
        r#"{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a b"}]}"#,
    ] {
        let [all, answers] = of(line, TrainedTokens::Answers);
        assert_eq!([&*all, &answers], [turn, "a b<|im_end|>\n"], "{line}");
        assert_eq!(of(line, TrainedTokens::All)[1], turn);
    }
    let [all, answers] = of(TWO_TURNS, TrainedTokens::Answers);
    assert_eq!(answers, "A1<|im_end|>\n|A2<|im_end|>\n");
    assert_eq!(
        of(TWO_TURNS, TrainedTokens::Last),
        [all.clone(), "A2<|im_end|>\n".into()]
    );
    // A template with marks determines the tokens of the answers. Here the line end is not included.
    let marked = template("chatml_marked");
    let of_marked = |line: &str, loss| trained(line, Some(&marked), loss).unwrap();
    assert_eq!(
        of_marked(TWO_TURNS, TrainedTokens::Answers),
        [all, "A1<|im_end|>|A2<|im_end|>|".into()]
    );
    assert_eq!(
        of_marked(TWO_TURNS, TrainedTokens::Last)[1],
        "A2<|im_end|>|"
    );
    // Answers in the prompt have no loss.
    let shots = r#"{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
        {"role": "user", "content": "q2"}], "completion": [{"role": "assistant", "content": "a2"}]}"#;
    assert_eq!(of(shots, TrainedTokens::Answers)[1], "a2<|im_end|>\n");
    assert_eq!(of_marked(shots, TrainedTokens::Answers)[1], "a2<|im_end|>|");
    // Without a template, the tokens are the text and the end token.
    let line = r#"{"prompt": "1 + 1 = ", "completion": "2"}"#;
    let plain = |loss| trained(line, None, loss).unwrap();
    assert_eq!(plain(TrainedTokens::Answers), ["1 + 1 = 2\0", "2\0"]);
    assert_eq!(plain(TrainedTokens::All)[1], "1 + 1 = 2\0");
}

#[test]
fn a_template_that_changes_earlier_turns_is_refused() {
    let qwen = template("qwen3");
    let of = |loss| trained(TWO_TURNS, Some(&qwen), loss);
    let error = of(TrainedTokens::Answers).unwrap_err();
    assert!(
        error.contains("the text before message 2 when other messages follow it")
            && error.contains("set data.chat.loss to \"last\""),
        "{error}"
    );
    let [_, last] = of(TrainedTokens::Last).unwrap();
    assert_eq!(last, "<think>\n\n</think>\n\nA2<|im_end|>\n");
}

/// If tools and arguments differ between examples, the library `datasets` stores them as JSON text, or with null values
/// for missing keys.
#[test]
fn tools_and_calls_may_be_json_text() {
    let qwen = template("qwen3");
    let schema =
        r#"{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}"#;
    let text = |json: &str| serde_json::to_string(json).unwrap();
    let of = |tools: &str, call: &str, calls: &str| {
        let calls = calls.replace("CALL", call);
        let line = format!(
            r#"{{"tools": {tools}, "messages": [{{"role": "user", "content": "1+1"}},
                {{"role": "assistant", "content": "", "tool_calls": {calls}}}]}}"#
        );
        trained(&line, Some(&qwen), TrainedTokens::Last)
    };
    let list = format!("[{schema}]");
    let call = |arguments: &str| format!(r#"{{"name": "add", "arguments": {arguments}}}"#);
    let expected = of(&list, &call(r#"{"a": 1, "b": 1}"#), "[CALL]").unwrap();
    assert!(expected[0].contains(r#""name": "add""#), "{}", expected[0]);
    assert!(
        expected[1].contains(r#"{"a": 1, "b": 1}"#),
        "{}",
        expected[1]
    );
    let arguments = text(r#"{"a": 1, "b": 1}"#);
    let function = |call: &str| format!(r#"{{"type": "function", "function": {call}}}"#);
    for (tools, call, calls) in [
        (text(&list), call(&arguments), "[CALL]".to_string()),
        (
            format!("[{}]", text(schema)),
            function(&call(&arguments)),
            "[CALL]".into(),
        ),
        (
            list.replace("}}}", "}, \"strict\": null}}"),
            call(r#"{"a": 1, "c": null, "b": 1}"#),
            "[CALL]".into(),
        ),
        (
            list.clone(),
            String::new(),
            text(&format!("[{}]", call(&arguments))),
        ),
    ] {
        assert_eq!(
            of(&tools, &call, &calls).as_ref(),
            Ok(&expected),
            "{tools} {call} {calls}"
        );
    }
    let none = of("null", &call("{}"), "[CALL]").unwrap();
    for empty in ["\"\"", "[]", "\"[]\"", "\"null\""] {
        assert_eq!(
            of(empty, &call("\"\""), "[CALL]").as_ref(),
            Ok(&none),
            "{empty}"
        );
    }
    for (tools, arguments, says) in [
        (
            schema,
            "{}",
            "invalid tools: expected a list of schemas, or its JSON text",
        ),
        (
            &text(schema),
            "{}",
            "invalid tools: expected a list of schemas",
        ),
        ("[1]", "{}", "invalid tools: expected a list of schemas"),
        ("\"add\"", "{}", "invalid tools: the text is not JSON"),
        (
            &list,
            "[1]",
            "invalid arguments of a call in message 2: expected an object",
        ),
        (
            &list,
            "\"a=1\"",
            "invalid arguments of a call in message 2: the text is not JSON",
        ),
    ] {
        let error = of(tools, &call(arguments), "[CALL]").unwrap_err();
        assert!(error.starts_with(says), "{error}");
    }
    let error = of(&list, "3", "[CALL]").unwrap_err();
    assert!(
        error.starts_with("invalid tool_calls of message 2: expected a list of calls"),
        "{error}"
    );
}

/// DeepSeek's template joins the text of arguments with other text, Llama's writes a map as JSON, and Qwen's coder reads its keys.
#[test]
fn arguments_are_given_as_the_template_reads_them() {
    let folder = TestFolder::new();
    let line = r#"{"prompt": [{"role": "user", "content": "q"}], "completion":
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\":[1,\"x\"]}"}}]}]}"#;
    for (number, (arguments, expected)) in [
        ("{{ 'call ' + arguments + ';' }}", r#"call {"a":[1,"x"]};"#),
        ("{{ arguments | tojson }}", r#"{"a": [1, "x"]}"#),
        (
            "{% for key, value in arguments | items %}{{ key }}={{ value | tojson }}{% endfor %}",
            r#"a=[1, "x"]"#,
        ),
        (
            "{{ arguments if arguments is string else arguments | tojson }}",
            r#"{"a":[1,"x"]}"#,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let call = "{% set arguments = m.tool_calls[0].function.arguments %}";
        let text = format!(
            "{{% for m in messages %}}{{% if m.tool_calls %}}{call}{arguments}{{% else %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
        );
        let name = format!("{number}.jinja");
        folder.write(&name, text);
        let path = folder.path().join(&name);
        let template = ChatTemplate::read(&path, &Tokenizer::bytes(), None).unwrap();
        let found = trained(line, Some(&template), TrainedTokens::Answers).unwrap();
        assert_eq!(found[1], expected, "{arguments}");
    }
}

/// The template of Qwen 3 writes nothing for a list.
#[test]
fn parts_that_a_template_leaves_out_are_refused() {
    let qwen = template("qwen3");
    let of = |content: &str| {
        let line = format!(
            r#"{{"prompt": [{{"role": "user", "content": {content}}}], "completion": "a"}}"#
        );
        trained(&line, Some(&qwen), TrainedTokens::Answers)
    };
    assert!(of(r#""q""#).is_ok());
    let error = of(r#"[{"type": "text", "text": "q"}]"#).unwrap_err();
    assert!(
        error.starts_with("the content of message 1 is a list of parts"),
        "{error}"
    );
    let error = of(r#"["q"]"#).unwrap_err();
    assert!(
        error.starts_with("invalid content of message 1: expected a text, or a list of parts"),
        "{error}"
    );
}

#[test]
fn bad_lines_are_named() {
    let (chatml, gemma) = (template("chatml"), template("gemma"));
    let user = r#"{"role": "user", "content": "q"}"#;
    let messages = |more: &str| format!(r#"{{"messages": [{user}, {more}]}}"#);
    for (line, expected) in [
        ("{".to_string(), "it is not JSON: EOF"),
        ("[1]".into(), "found a list"),
        (r#"{"text": "a", "id": 3}"#.into(), "found `id`, `text`"),
        (r#"{"prompt": "a"}"#.into(), "found `prompt`"),
        (
            r#"{"prompt": 3, "answer": "b"}"#.into(),
            "invalid prompt: expected a text, or a list",
        ),
        (
            r#"{"messages": []}"#.into(),
            "invalid messages: expected a list of messages",
        ),
        (
            r#"{"prompt": "a", "answer": " \n"}"#.into(),
            "the answer in message 2 is empty",
        ),
        (
            messages(r#"{"role": "robot", "content": "a"}"#),
            "message 2 has the role \"robot\": expected system",
        ),
        (
            messages(r#"{"role": "assistant"}"#),
            "invalid content of message 2: expected a text",
        ),
        (
            messages(r#"{"content": "a"}"#),
            "invalid role of message 2: expected a text",
        ),
        (messages(user), "no message has the role assistant"),
        (
            messages(r#"{"role": "assistant", "content": "\uFDD0"}"#),
            "U+FDD0",
        ),
    ] {
        let error = trained(&line, Some(&chatml), TrainedTokens::Answers).unwrap_err();
        assert!(error.contains(expected), "{line}: {error}");
    }
    let system = r#"{"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]}"#;
    let error = trained(system, Some(&gemma), TrainedTokens::Answers).unwrap_err();
    assert!(
        error.contains("gemma.jinja: ") && error.contains("System role not supported"),
        "{error}"
    );
    let error = trained(&messages(user), None, TrainedTokens::Answers).unwrap_err();
    assert!(error.contains("no message has the role"), "{error}");
    let error = trained(TWO_TURNS, None, TrainedTokens::Answers).unwrap_err();
    assert!(error.contains("bytes has no chat template"), "{error}");
}

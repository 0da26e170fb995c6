use super::*;
use crate::data::test_folder::TestFolder;
use crate::data::{Batch, IGNORE};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/chat");

fn template(name: &str) -> ChatTemplate {
    let path = format!("{FIXTURES}/{name}.jinja");
    ChatTemplate::read(path.as_ref(), &Tokenizer::bytes(), None).unwrap()
}

/// The whole text, and what of it has a loss, with `|` between its parts.
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
    // A template that marks answers says which tokens they are, here without the line end.
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
    // Answers of the prompt are not trained.
    let shots = r#"{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
        {"role": "user", "content": "q2"}], "completion": [{"role": "assistant", "content": "a2"}]}"#;
    assert_eq!(of(shots, TrainedTokens::Answers)[1], "a2<|im_end|>\n");
    assert_eq!(of_marked(shots, TrainedTokens::Answers)[1], "a2<|im_end|>|");
    // Without a template, a text and its end.
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
        error.contains("before message 2 differently once other messages follow it")
            && error.contains("set data.chat.loss to \"last\""),
        "{error}"
    );
    let [_, last] = of(TrainedTokens::Last).unwrap();
    assert_eq!(last, "<think>\n\n</think>\n\nA2<|im_end|>\n");
}

/// The library `datasets` stores tools and arguments that differ as JSON text, or with keys of null.
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
        (
            "\"add\"",
            "{}",
            "invalid tools: it is a text that is not JSON",
        ),
        (
            &list,
            "[1]",
            "invalid arguments of a call in message 2: expected an object",
        ),
        (
            &list,
            "\"a=1\"",
            "invalid arguments of a call in message 2: it is a text that is not JSON",
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
    let folder = TestFolder::new("chat-arguments");
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

/// A file of plain examples, of 3 to 12 tokens, after an empty line.
fn file(folder: &TestFolder, examples: usize) -> PathBuf {
    let lines = (0..examples).map(|i| {
        let prompt = "p".repeat(1 + i % 7);
        format!(
            "{{\"prompt\": \"{prompt}\", \"completion\": \"{}\"}}\r\n",
            i % 1000
        )
    });
    folder.write(
        "chat.jsonl",
        format!("\u{feff}\n{}", lines.collect::<String>()),
    );
    folder.path().join("chat.jsonl")
}

fn config(files: PathBuf, seq: usize) -> ChatDataConfig {
    ChatDataConfig {
        files: vec![files],
        held_out: HeldOutExamples::Share(0.2),
        loss: TrainedTokens::Answers,
        long: LongExamples::Truncate,
        packing: true,
        seq,
    }
}

fn open(config: ChatDataConfig) -> Result<ChatData, String> {
    let opened = ChatData::open(config, &Tokenizer::bytes(), None, &mut |_| {});
    opened.map_err(|error| error.to_string())
}

/// The examples of a row, as inputs and targets.
fn documents(sample: &Sample) -> Vec<(Vec<i32>, Vec<i32>)> {
    let length = sample.tokens.len();
    let ends = sample.documents[1..].iter().chain([&length]);
    let each = sample.documents.iter().zip(ends).map(|(begin, end)| {
        let of = |all: &[i32]| all[*begin..*end].to_vec();
        (of(&sample.tokens), of(&sample.targets))
    });
    each.filter(|(_, targets)| targets.iter().any(|target| *target != IGNORE))
        .collect()
}

#[test]
fn rows_hold_whole_examples_and_every_one_once_per_epoch() {
    let folder = TestFolder::new("chat-rows");
    let path = file(&folder, 10_000);
    let mut read = 0;
    let data = ChatData::open(
        config(path.clone(), 32),
        &Tokenizer::bytes(),
        None,
        &mut |bytes| read += bytes,
    );
    let data = data.unwrap();
    assert_eq!(read, std::fs::metadata(&path).unwrap().len());
    let rows = data.rows() as u64;
    let sampling = |seed, samples| Sampling {
        seq: 32,
        seed,
        samples,
    };
    let samples = data.training(&sampling(5, 2 * rows)).unwrap();
    let epoch = |samples: &Arc<dyn Samples>, epoch: u64| {
        let rows = (epoch * rows..(epoch + 1) * rows).map(|number| samples.sample(number).unwrap());
        rows.collect::<Vec<_>>()
    };
    let first = epoch(&samples, 0);
    assert!(
        first
            .iter()
            .all(|row| row.tokens.len() == 32 && row.targets.len() == 32)
    );
    let padding = |row: &Sample| {
        row.targets
            .iter()
            .rev()
            .take_while(|to| **to == IGNORE)
            .count()
    };
    assert!(first.iter().all(|row| row.padding == padding(row)));
    assert!(first.iter().any(|row| row.padding > 0));
    let texts = |rows: &[Sample]| {
        let examples = rows.iter().flat_map(documents).map(|(tokens, targets)| {
            let prompt = tokens
                .iter()
                .take_while(|token| **token == i32::from(b'p'))
                .count();
            assert_eq!(targets[..prompt - 1], vec![IGNORE; prompt - 1]);
            assert_eq!(
                targets[prompt - 1..targets.len() - 1],
                tokens[prompt..],
                "shifted by one"
            );
            assert_eq!(targets.last(), Some(&0), "the end has a loss");
            let number = tokens[prompt..].iter().map(|token| *token as u8 as char);
            (prompt, number.collect::<String>())
        });
        let mut texts: Vec<_> = examples.collect();
        texts.sort();
        texts
    };
    let held_out = data.held_out(32, usize::MAX).unwrap();
    assert_eq!(data.held_out(32, 3).unwrap(), held_out[..3]);
    let mut all = [texts(&first), texts(&held_out)].concat();
    assert_eq!((texts(&first).len(), all.len()), (8000, 10_000));
    all.sort();
    let mut expected: Vec<_> = (0..10_000)
        .map(|i| (1 + i % 7, (i % 1000).to_string()))
        .collect();
    expected.sort();
    assert_eq!(all, expected);
    // Another order of the same rows; the beginning does not depend on the length of the run.
    let second = epoch(&samples, 1);
    assert_ne!(first, second);
    assert_eq!(texts(&first), texts(&second));
    let shorter = data.training(&sampling(5, 3)).unwrap();
    assert_eq!(shorter.batch(0..9).unwrap(), samples.batch(0..9).unwrap());
    let other = data.training(&sampling(6, 3)).unwrap();
    assert_ne!(other.batch(0..9).unwrap(), samples.batch(0..9).unwrap());
    assert_eq!(samples.sample(0).unwrap(), first[0], "after another epoch");
    // The threads that tokenize do not matter.
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    let one = pool.install(|| open(config(path.clone(), 32)).unwrap());
    assert_eq!(one.fingerprint(), data.fingerprint());
    let described = data.describe();
    assert!(
        described.contains("8,000 conversations to train on, 2,000 held out"),
        "{described}"
    );
    assert!(data.training.fill_ratio() > 0.97, "{described}");
    // One example in each row.
    let alone = open(ChatDataConfig {
        packing: false,
        ..config(path, 32)
    })
    .unwrap();
    assert_eq!(alone.rows(), 8000);
    let batch = Batch::new((0..4).map(|row| alone.training.sample(row))).unwrap();
    assert_eq!(batch.documents.unwrap().len(), 2 * 4 + 1);
    assert_ne!(alone.fingerprint(), data.fingerprint());
    assert!(
        data.held_out(31, 1)
            .unwrap_err()
            .to_string()
            .contains("rows of 32 tokens, not 31")
    );
}

#[test]
fn long_examples_are_counted_or_refused() {
    let folder = TestFolder::new("chat-long");
    let path = folder.path().join("chat.jsonl");
    let line = |prompt: usize, answer: usize| {
        let [prompt, answer] =
            [("p", prompt), ("a", answer)].map(|(letter, count)| letter.repeat(count));
        format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{answer}\"}}\n")
    };
    // 9 tokens, which is one more than a row, as the last is a target only; 10; a prompt of 9.
    folder.write("chat.jsonl", line(4, 4) + &line(4, 5) + &line(9, 1));
    let with = |long, held_out| {
        let config = config(path.clone(), 8);
        open(ChatDataConfig {
            long,
            held_out: HeldOutExamples::Share(held_out),
            ..config
        })
    };
    let truncated = with(LongExamples::Truncate, 0.0).unwrap();
    assert_eq!(truncated.training.examples.len(), 2);
    let described = truncated.describe();
    assert!(
        described.ends_with("full; 1 truncated; 1 left out as their prompts fill a row"),
        "{described}"
    );
    let cut = truncated.training.sample(1);
    assert_eq!(cut.targets[7], i32::from(b'a'), "its end is cut off");
    assert!(truncated.held_out(8, 9).unwrap().is_empty());
    let dropped = with(LongExamples::Drop, 0.0).unwrap();
    assert!(
        dropped
            .describe()
            .ends_with("; 2 left out as longer than a row")
    );
    let error = with(LongExamples::Refuse, 0.0).err().unwrap();
    assert!(
        error.contains(
            "chat.jsonl', line 2: it has 10 tokens, and a row of 8 has space for 9: use a \
                        train.sequence_length of at least 9"
        ),
        "{error}"
    );
    let error = with(LongExamples::Drop, 0.5).err().unwrap();
    assert!(
        error.contains("cannot be held out of 1 conversation(s)"),
        "{error}"
    );
    assert!(
        with(LongExamples::Drop, 1.0)
            .err()
            .unwrap()
            .contains("invalid share 1")
    );
    folder.write("chat.jsonl", line(9, 9));
    let error = with(LongExamples::Drop, 0.0).err().unwrap();
    assert_eq!(
        error,
        "no conversation to train on; 1 left out as longer than a row"
    );
    folder.write("chat.jsonl", b"\n{\"\xff");
    let error = with(LongExamples::Drop, 0.5).err().unwrap();
    assert!(
        error.ends_with("line 2: it is not UTF-8 from byte 2 on"),
        "{error}"
    );
    folder.write("chat.jsonl", "");
    assert_eq!(
        with(LongExamples::Drop, 0.5).err().unwrap(),
        "no conversation to train on"
    );
    // Files of their own are held out; folders have theirs.
    folder.write("held/a.jsonl", line(1, 1));
    folder.write("chat.jsonl", line(2, 2) + "\n{}\n");
    let held_out = HeldOutExamples::Files(vec![folder.path().join("held")]);
    let of = |held_out| {
        open(ChatDataConfig {
            held_out,
            ..config(path.clone(), 8)
        })
    };
    let error = of(held_out.clone()).err().unwrap();
    assert!(
        error.contains("chat.jsonl', line 3: expected an object with `prompt`"),
        "{error}"
    );
    folder.write("chat.jsonl", line(2, 2));
    let data = of(held_out).unwrap();
    assert_eq!(data.held_out(8, 9).unwrap()[0].tokens[..2], [112, 97]);
    let missing = HeldOutExamples::Files(vec![folder.path().join("none.jsonl")]);
    assert!(of(missing).err().unwrap().contains("none.jsonl"));
}

//! A tokenizer of words.

use burn_megatron_data::tokenizer::Tokenizer;

/// Returns a tokenizer of the words `w1` to `w20`, which are the tokens 1 to 20. Token 0 ends a text.
///
/// # Panics
///
/// Panics if the folder for temporary files is not writable.
pub fn words() -> Tokenizer {
    let name = format!("generate-words-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let words: Vec<String> = (1..21).map(|i| format!("\"w{i}\": {i}")).collect();
    let tokenizer = format!(
        r#"{{"version": "1.0", "added_tokens": [{{"id": 0, "content": "<end>", "special": true,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}}],
        "pre_tokenizer": {{"type": "Whitespace"}},
        "model": {{"type": "WordLevel", "vocab": {{"<end>": 0, {}}}, "unk_token": "<end>"}}}}"#,
        words.join(", ")
    );
    std::fs::write(folder.join("tokenizer.json"), tokenizer).unwrap();
    let config = r#"{"eos_token": "<end>"}"#;
    std::fs::write(folder.join("tokenizer_config.json"), config).unwrap();
    let tokenizer = Tokenizer::open(&folder).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    tokenizer
}

//! Reads the sidecar files of token files.

use std::path::Path;

use crate::gpt::SamplingError;
use crate::tokenizer::TokenFileInfo;

/// Reads the sidecars, which must not contradict each other. A file without a sidecar gets empty information.
pub(super) fn read(prefixes: &[&Path]) -> Result<Vec<TokenFileInfo>, SamplingError> {
    let all: Vec<_> = prefixes
        .iter()
        .map(|prefix| TokenFileInfo::read(prefix))
        .map(|info| Ok(info?.unwrap_or_default()))
        .collect::<Result<_, SamplingError>>()?;
    let mut known: [Option<(&Path, String)>; 3] = Default::default();
    for (other, info) in prefixes.iter().zip(&all) {
        for ((what, fact), known) in facts(info).into_iter().zip(&mut known) {
            match (fact, &known) {
                (Some(fact), None) => *known = Some((other, fact)),
                (Some(second), Some((prefix, first))) if *first != second => {
                    return Err(SamplingError::Disagree {
                        prefix: prefix.to_path_buf(),
                        other: other.to_path_buf(),
                        what,
                        first: first.clone(),
                        second,
                    });
                }
                _ => {}
            }
        }
    }
    Ok(all)
}

/// Returns the properties that must be equal for all files of a tokenizer.
fn facts(info: &TokenFileInfo) -> [(&'static str, Option<String>); 3] {
    [
        ("the tokenizer", info.tokenizer.clone()),
        ("the vocabulary", info.vocabulary.map(|x| x.to_string())),
        ("eod", info.eod.map(|eod| eod.to_string())),
    ]
}

/// Returns the average number of bytes of text per token in the blend; 1 if unknown for any file.
pub(super) fn bytes_per_token(files: &[TokenFileInfo], weights: Option<&[f64]>) -> f64 {
    let each = files.iter().map(TokenFileInfo::bytes_per_token);
    let Some(each) = each.collect::<Option<Vec<_>>>() else {
        return 1.0;
    };
    match weights {
        Some(weights) => each.iter().zip(weights).map(|(each, w)| w * each).sum(),
        None => {
            let sum = |of: fn(&TokenFileInfo) -> u64| files.iter().map(of).sum::<u64>() as f64;
            sum(|info| info.bytes) / sum(|info| info.tokens)
        }
    }
}

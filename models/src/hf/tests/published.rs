//! Tests of the names, dtypes and shapes of the tensors of published models. `index.py` next to the fixtures writes the
//! lists.

use burn_megatron::checkpoint::HeaderEntry;
use safetensors::Dtype;
use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Published {
    parameters: u64,
    config: Value,
    /// Name patterns with ranges of numbers, dtypes and shapes.
    tensors: Vec<(String, Dtype, Vec<usize>)>,
}

/// Returns the names that match a pattern such as `layers.0-2.up`.
fn names(pattern: &str) -> Vec<String> {
    let mut names = vec![String::new()];
    for (place, part) in pattern.split('.').enumerate() {
        let range = part.split_once('-');
        let range = range.and_then(|(a, b)| Some(a.parse::<usize>().ok()?..=b.parse().ok()?));
        let parts: Vec<_> = match range {
            Some(range) => range.map(|number| number.to_string()).collect(),
            None => vec![part.to_string()],
        };
        let dot = if place == 0 { "" } else { "." };
        let all = names.iter();
        names = all
            .flat_map(|name| parts.iter().map(move |part| format!("{name}{dot}{part}")))
            .collect();
    }
    names
}

fn published() -> BTreeMap<String, Published> {
    serde_json::from_slice(&fs::read(fixture("published.json")).unwrap()).unwrap()
}

/// Checks that all tensors are known and that no tensor is missing. The number of parameters must equal the number in
/// `transformers`.
#[test]
fn published_models_have_their_tensors() {
    let published = published();
    assert_eq!(published.len(), 18);
    for (name, model) in published {
        let config: HfConfig = HfConfig::parse(model.config.to_string().as_bytes()).unwrap();
        let mut found = BTreeMap::new();
        for (pattern, dtype, shape) in &model.tensors {
            for name in names(pattern) {
                let entry = HeaderEntry {
                    name: name.clone(),
                    dtype: *dtype,
                    shape: shape.clone(),
                    begin: 0,
                    size: 0,
                };
                assert!(found.insert(name, (0, entry)).is_none());
            }
        }
        let folder = HfFolder::of_tensors(Path::new(&name), config, vec![], found);
        let folder = folder.unwrap_or_else(|error| panic!("{name}: {error}"));
        let keys = folder.keys();
        let weights = keys.iter().filter(|key| !key.ends_with("expert_bias"));
        let sizes = weights.map(|key| folder.tensor(key).unwrap().shape);
        let parameters: u64 = sizes
            .map(|shape| shape.iter().product::<usize>() as u64)
            .sum();
        // The number of parameters in `transformers` does not include multi-token prediction, because it has no module
        // for it.
        let further = if name == "deepseek-v3" {
            11_610_067_968
        } else {
            0
        };
        assert_eq!(parameters, model.parameters + further, "{name}");
        let config = folder.config();
        let text = config.to_json().unwrap();
        let again: HfConfig = HfConfig::parse(text.as_bytes()).unwrap();
        assert_eq!(again, *config, "{name}");
        assert!(!text.contains("quantization_config"), "{name}");
        let derived: HfConfig = HfConfig::of(&config.model).unwrap();
        assert_eq!(derived.family, config.family, "{name}");
        assert_eq!(folder.left_out(), None, "{name}");
    }
}

use insta::assert_snapshot;

use super::*;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Table {
    optimizer: OptimizerConfig,
}

fn parse(text: &str) -> Result<OptimizerConfig, String> {
    let text = format!("[optimizer]\n{text}");
    let table = toml::from_str::<Table>(&text).map_err(|error| error.message().to_string());
    table.map(|table| table.optimizer)
}

#[test]
fn the_name_says_which_settings_there_are() {
    let adamw = AdamWConfig {
        beta2: 0.9,
        ..AdamWConfig::default()
    };
    assert_eq!(parse("beta2 = 0.9"), Ok(adamw.into()));
    let lion = LionConfig {
        beta1: 0.0,
        ..LionConfig::default()
    };
    assert_eq!(
        parse("name = 'lion'\nbeta1 = 0"),
        Ok(OptimizerConfig::Lion(lion))
    );
    let error = |text| parse(text).unwrap_err();
    assert_snapshot!(
        error("name = 'lion'\nepsilon = 1e-8"),
        @"optimizer lion: unknown field `epsilon`, expected one of `beta1`, `beta2`, `weight_decay`, `groups`"
    );
    assert_snapshot!(
        error("name = 'lamb'"),
        @"invalid optimizer name \"lamb\": it requires norms or means of whole tensors, but a rank has only a shard; \
          expected adamw, muon, sgd, adam, adan, lion, rmsprop or adagrad"
    );
    assert!(
        error("name = 'lionn'").starts_with("invalid optimizer name \"lionn\": expected adamw, ")
    );
    // A NaN is accepted by the parser and reaches the check.
    let nan = parse("name = 'sgd'\nmomentum = nan").unwrap();
    let message = nan.check().unwrap_err().to_string();
    assert!(
        message.starts_with("invalid optimizer setting momentum = NaN"),
        "{message}"
    );
}

#[test]
fn every_optimizer_is_written_with_all_its_settings_and_read_again() {
    for name in NAMES
        .split([',', ' '])
        .filter(|name| !["", "or"].contains(name))
    {
        let config = parse(&format!("name = '{name}'")).unwrap();
        assert_eq!(config.to_string(), name);
        config.check().unwrap();
        let table = Table { optimizer: config };
        let text = toml::to_string(&table).unwrap();
        assert!(text.contains(&format!("name = \"{name}\"")), "{text}");
        assert!(text.contains("weight_decay = "), "{text}");
        assert_eq!(toml::from_str::<Table>(&text).unwrap(), table);
        let json = serde_json::to_string(&table).unwrap();
        assert_eq!(serde_json::from_str::<Table>(&json).unwrap(), table);
    }
}

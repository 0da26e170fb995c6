//! Tests that the recipes of published models at full size match their first comments.

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use burn_megatron_plan::fit;
use burn_megatron_plan::hardware::Hardware;

use crate::estimate::RankEstimates;
use crate::memory_limit;

/// The number of parameters of the released weights.
const RECIPES: [(&str, usize); 17] = [
    ("llama-3-8b", 8_030_261_248),
    ("llama-3-70b", 70_553_706_496),
    ("llama-3.1-405b", 405_853_388_800),
    ("gpt-3-175b", 174_604_259_328),
    ("mixtral-8x7b", 46_702_792_704),
    ("mixtral-8x22b", 140_630_071_296),
    ("qwen3-8b", 8_190_735_360),
    ("qwen3-30b-a3b", 30_532_122_624),
    ("qwen3-235b-a22b", 235_093_634_560),
    ("deepseek-v2-lite", 15_706_484_224),
    ("deepseek-v3", 682_636_472_320),
    ("gpt-oss-20b", 20_914_757_184),
    ("gpt-oss-120b", 116_829_156_672),
    ("olmoe-1b-7b", 6_919_161_856),
    ("gemma-2-9b", 9_241_705_984),
    ("gpt2-124m", 124_439_808),
    ("gpt2-1.5b", 1_557_611_200),
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/recipes")
}

/// Comment at the start of a recipe.
struct Header {
    parameters: usize,
    devices: usize,
    device: Hardware,
    /// The planned memory of a rank in GB.
    memory: f64,
}

impl Header {
    /// Parses `... N parameters ..., on D x DEVICE. ... Source: ... Plan: M GB ... Run: ...`.
    fn read(name: &str, text: &str) -> Self {
        let comment = text.lines().map_while(|line| line.strip_prefix('#'));
        let words: Vec<_> = comment.flat_map(str::split_whitespace).collect();
        let at = |start: &str| {
            let found = words.iter().position(|word| word.starts_with(start));
            found.unwrap_or_else(|| panic!("{name}: no {start:?} in its comment"))
        };
        let number = |at: usize| words[at].replace(',', "");
        at("Source:");
        at("Run:");
        Self {
            parameters: number(at("parameters") - 1).parse().unwrap(),
            devices: number(at("x") - 1).parse().unwrap(),
            device: Hardware::named(words[at("x") + 1].trim_end_matches('.')).unwrap(),
            memory: number(at("Plan:") + 1).parse().unwrap(),
        }
    }
}

/// Checks the parameters, the devices and the planned memory of each recipe, that it fits, and the row of the book's
/// table.
#[test]
fn the_published_recipes_are_what_they_say() {
    let book = fs::read_to_string(folder().join("../../docs/src/recipes.md")).unwrap();
    let mut wrong = vec![];
    for (name, parameters) in RECIPES {
        let path = folder().join(format!("{name}.toml"));
        let header = Header::read(name, &fs::read_to_string(&path).unwrap());
        let recipe = crate::recipe::read(&path);
        let plan = recipe
            .plan()
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(plan.mesh.world_size(), header.devices, "{name}");
        let layout = recipe.layout();
        let has_experts = recipe.model.as_transformer().unwrap().moe.is_some();
        assert!(!has_experts || layout.tensor == 1 || layout.sequence_parallel);
        let found = RankEstimates::new(&recipe, &plan, &Device::flex()).unwrap();
        assert_eq!(found.parameters, parameters, "{name}");
        assert_eq!(header.parameters, parameters, "{name}");
        let peak = memory_limit::plan(&recipe).unwrap().fullest().1.peak;
        let memory = fit::with_slack(peak).total();
        assert!(memory <= header.device.memory, "{name}: {memory} bytes");
        let gigabytes = memory as f64 / 1e9;
        if (header.memory - gigabytes).abs() >= 0.1 {
            wrong.push(format!(
                "{name}: {} GB, and the plan says {gigabytes:.1} GB",
                header.memory
            ));
        }
        let row = format!("| `{name}` |");
        let row = book.lines().find(|line| line.starts_with(&row));
        let row =
            row.unwrap_or_else(|| panic!("{name} is not in the table of docs/src/recipes.md"));
        let device = format!("{} x {}", header.devices, header.device.name);
        for cell in [device, format!("{:.1} GB", header.memory)] {
            assert!(row.contains(&format!("| {cell} |")), "{name}: no {cell}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let all = fs::read_dir(folder()).unwrap().count();
    assert_eq!(all, RECIPES.len() + 10 + 5, "a recipe that no test knows");
}

use std::fs;

use tempfile::TempDir;

use burn_megatron::nn::lora::LoraConfig;

use super::*;
use crate::flags::parse_text;
use crate::pretrain::args::PretrainArgs;
use crate::recipe::DEFAULT_RECIPE;
use crate::weights;

/// Folder with recipes.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn write(&self, name: &str, text: &str) -> String {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().into()
    }
}

pub fn resolve(flags: &str) -> Result<LayeredRecipe, Error> {
    let families = Families::transformers();
    Recipe::resolve(
        &parse_text::<PretrainArgs>(flags)?,
        &families,
        DEFAULT_RECIPE,
    )
}

pub fn recipe(flags: &str) -> Recipe {
    let recipe = resolve(flags)
        .unwrap_or_else(|error| panic!("{flags}: {error}"))
        .recipe;
    recipe
        .plan()
        .unwrap_or_else(|error| panic!("{flags}: {error}"));
    recipe
}

pub fn error(flags: &str) -> String {
    match resolve(flags).and_then(|layered| layered.recipe.plan().map(drop)) {
        Ok(()) => panic!("{flags} were not refused"),
        Err(error) => error.to_string(),
    }
}

/// Returns the path of the weights of a small Llama.
fn weights() -> String {
    fixture("hf/llama2")
}

/// Returns the path of a model folder or of an adapter folder.
fn fixture(name: &str) -> String {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures");
    format!("{fixtures}/{name}")
}

#[test]
fn another_optimizer_on_the_command_line_has_its_own_defaults() {
    let folder = Folder::new();
    let text = "[train.optimizer]\nname = 'adamw'\nbeta1 = 0.8\ngroups = [{pattern = '**', weight_decay = 0.5}]";
    let file = folder.write("recipe.toml", text);
    let of = |flags: &str| {
        let optimizer = recipe(&format!("--recipe {file} {flags}")).train.optimizer;
        serde_json::to_value(optimizer).unwrap()
    };
    assert_eq!(of("")["beta1"], 0.8);
    let sgd = of("--train.optimizer.name sgd");
    assert_eq!(
        (sgd["momentum"].as_f64(), sgd.get("beta1")),
        (Some(0.9), None)
    );
    assert_eq!(sgd["groups"][0]["weight_decay"], 0.5);
    let lion = of("--set train.optimizer.name=lion --train.optimizer.weight_decay 0.3");
    assert_eq!(
        (lion["beta1"].as_f64(), lion["weight_decay"].as_f64()),
        (Some(0.9), Some(0.3))
    );
}

#[test]
fn a_recipe_is_the_default_one_with_its_own_values() {
    let folder = Folder::new();
    let default = recipe("");
    let of = |text: &str| recipe(&format!("--recipe {}", folder.write("recipe.toml", text)));
    assert_eq!(of(""), default);
    let sizes = of("[model]\nhidden = 64\nlayers = 2\nheads = 8");
    let model = sizes.model.as_transformer().unwrap();
    assert_eq!(
        (sizes.model.family(), model.hidden, model.groups),
        ("llama", 64, Some(8))
    );
    assert_eq!((model.tied, &sizes.parallel), (true, &default.parallel));
    // Warm-up is scaled with the steps. Other settings do not change.
    let short = of("[train]\nsteps = 3");
    assert_eq!((short.train.steps, short.train.warmup_steps), (3, 0));
    let half = of("[train]\nsteps = 400\nlearning_rate = 3e-3");
    assert_eq!(
        (half.train.warmup_steps, half.train.min_learning_rate),
        (20, 1.5e-4)
    );
    let own = of("[train]\nsteps = 3\nwarmup_steps = 2");
    assert_eq!(own.train.warmup_steps, 2);
    assert_eq!(
        of("[train]\nschedule = 'constant'").train.min_learning_rate,
        0.0
    );
    // A layout and a named family replace the whole table.
    let layout = of("[parallel]\ntensor = 4");
    assert_eq!(layout.plan().unwrap().mesh.world_size(), 4);
    let family = of("[model]\nfamily = 'qwen3'");
    let named = Families::transformers().model("family = 'qwen3'".parse().unwrap());
    assert_eq!(family.model, named.unwrap());
    assert_eq!(family.train, default.train);
    // A complete recipe is not changed.
    let complete = toml::to_string(&Recipe::default().complete()).unwrap();
    assert_eq!(of(&complete), Recipe::default());
}

#[test]
fn any_key_can_be_set() {
    let folder = Folder::new();
    let set = recipe(
        "--set model.hidden=64 --set train.clip=0.5 --set train.steps=80 --set parallel.pipeline=1 \
         --set train.schedule={wsd={decay_steps=8,tail='linear'}} --set data.tokenizer=bytes",
    );
    let model = set.model.as_transformer().unwrap();
    assert_eq!(
        (model.hidden, set.train.clip, set.train.warmup_steps),
        (64, 0.5, 4)
    );
    assert_eq!((set.parallel.pipeline, set.parallel.tensor), (1, 2));
    let file = folder.write(
        "recipe.toml",
        "[train]\nsteps = 600\nschedule = { wsd = { decay_steps = 150, tail = 'minus_sqrt' } }\n[lora]\nrank = 2",
    );
    let over = recipe(&format!(
        "--recipe {file} --set train.steps=3 --set lora.alpha=3"
    ));
    let wanted = "{ wsd = { decay_steps = 1, tail = 'minus_sqrt' } }";
    let wanted: Table = format!("x = {wanted}").parse().unwrap();
    assert_eq!(table_of(&over.train).unwrap()["schedule"], wanted["x"]);
    let lora = over.lora.unwrap();
    assert_eq!((lora.rank, lora.alpha), (2, 3.0));
    let variant = format!("--recipe {file} --set train.schedule=linear");
    assert_eq!(
        table_of(&recipe(&variant).train).unwrap()["schedule"],
        "linear".into()
    );
    for (flags, says) in [
        (
            "--set train.step=3",
            "invalid --set: a recipe has no key train.step; did you mean train.steps?",
        ),
        (
            "--set model.hiden=3",
            "invalid --set: a recipe has no key model.hiden; did you mean model.hidden?",
        ),
        ("--set train.steps=x", "invalid --set: invalid type"),
        (
            "--steps 3 --set train.steps=4",
            "train.steps is set by --set and by a flag",
        ),
        (
            "--tp 1 --set parallel.tensor=4",
            "parallel.tensor is set by --set and by a flag",
        ),
    ] {
        let error = error(flags);
        assert!(error.contains(says), "{flags}: {error}");
    }
    let misspelt = folder.write("misspelt.toml", "\n[model]\nhiden = 3");
    let error = error(&format!("--recipe {misspelt} --set train.clip=1.0"));
    assert!(
        error.contains("misspelt.toml: [model] unknown field `hiden`"),
        "{error}"
    );
}

#[test]
fn weights_bring_their_model_and_their_tokenizer() {
    let load = format!("--load {}", weights());
    let loaded = recipe(&load);
    let found = Families::transformers().open(weights().as_ref()).unwrap().0;
    assert_eq!(loaded.model, found);
    assert_eq!(loaded.parallel.world_size().unwrap(), 1);
    // At most the maximum context of the model.
    assert_eq!(loaded.train.sequence_length, Some(found.context().min(512)));
    let set = recipe(&format!("{load} --set model.dropout=0.5"));
    let model = set.model.as_transformer().unwrap();
    assert_eq!((model.dropout, model.layers), (0.5, found.layers()));
}

/// Checks that flags change the model only as `with` changes `expected`.
fn changes_only(flags: &str, mut expected: Value, with: impl FnOnce(&mut Value)) {
    with(&mut expected);
    let found = resolve(flags).unwrap_or_else(|error| panic!("{flags}: {error}"));
    let found = Value::try_from(&found.recipe.model).unwrap();
    assert_eq!(found, expected, "{flags}");
}

#[test]
fn a_key_of_a_nested_table_changes_that_key_only() {
    let folder = Folder::new();
    let families = Families::transformers();
    let losses = "[{ kind = 'balance', coefficient = 0.01 }]";
    let value: Table = format!("x = {losses}").parse().unwrap();
    let set_losses = |model: &mut Value| model["moe"]["losses"] = value["x"].clone();
    let file = folder.write("losses.toml", &format!("[model.moe]\nlosses = {losses}"));
    let set = format!("--set model.moe.losses={}", losses.replace(' ', ""));
    // Weights of a model whose experts have no default settings.
    let load = format!("--load {}", fixture("hf/deepseek-v3"));
    let model = families.open(fixture("hf/deepseek-v3").as_ref()).unwrap().0;
    let model = Value::try_from(&model).unwrap();
    let expected = || model.clone();
    changes_only(&format!("{load} {set}"), expected(), set_losses);
    changes_only(&format!("{load} --recipe {file}"), expected(), set_losses);
    let load_in_file = format!(
        "base = 'none'\n[checkpoint]\nload = '{}'\n[model.moe]\nlosses = {losses}",
        fixture("hf/deepseek-v3")
    );
    let alone = folder.write("alone.toml", &load_in_file);
    changes_only(&format!("--recipe {alone}"), expected(), set_losses);
    changes_only(
        &format!("{load} --set model.mla.norm_epsilon=0.5"),
        expected(),
        |model| {
            model["mla"]["norm_epsilon"] = 0.5.into();
        },
    );
    // A key of a variant, and another variant.
    let llama = families.open(fixture("hf/llama3").as_ref()).unwrap().0;
    let llama = || Value::try_from(&llama).unwrap();
    let load = format!("--load {}", fixture("hf/llama3"));
    let scaling = "model.positions.rotary.scaling";
    changes_only(
        &format!("{load} --set {scaling}.llama3.factor=2.0"),
        llama(),
        |model| {
            model["positions"]["rotary"]["scaling"]["llama3"]["factor"] = 2.0.into();
        },
    );
    changes_only(
        &format!("{load} --set {scaling}={{linear={{factor=2.0}}}}"),
        llama(),
        |model| {
            let linear: Table = "linear = { factor = 2.0 }".parse().unwrap();
            model["positions"]["rotary"]["scaling"] = linear.into();
        },
    );
    // Defaults of a family.
    let olmoe = families.model("family = 'olmoe'".parse().unwrap()).unwrap();
    let olmoe = || Value::try_from(&olmoe).unwrap();
    assert_eq!(olmoe()["moe"]["score"], "pre-softmax".into());
    changes_only(
        &format!("--set model.family=olmoe {set}"),
        olmoe(),
        set_losses,
    );
    let named = folder.write(
        "named.toml",
        &format!("[model]\nfamily = 'olmoe'\n[model.moe]\nlosses = {losses}"),
    );
    changes_only(&format!("--recipe {named}"), olmoe(), set_losses);
    // A resumed run whose model has no query rank and no groups, although its family has both by default.
    let text = "[model]\nfamily = 'deepseek_v3'\n[model.moe]\nexperts = 4\n\
                [model.mla]\nkv_rank = 8\nnope_width = 8\nrope_width = 4\nvalue_width = 8";
    let run = crate::recipe::parsed(text).unwrap();
    let flags: SetArgs = parse_text(&set).unwrap();
    let layers = RecipeLayers {
        resumed: Some(("run".as_ref(), &run)),
        ..RecipeLayers::new((&families, DEFAULT_RECIPE), None, &flags)
    };
    let resumed = layers.read().unwrap();
    let mut expected = Value::try_from(&run.model).unwrap();
    set_losses(&mut expected);
    assert_eq!(Value::try_from(&resumed.recipe.model).unwrap(), expected);
}

#[test]
fn adapters_that_are_loaded_keep_their_settings() {
    let folder = Folder::new();
    let config = fs::read_to_string(fixture("peft/adapter_config.json")).unwrap();
    let config = config.replace("../hf/llama3", &fixture("hf/llama3"));
    folder.write("adapter_config.json", &config);
    let weights = "adapter_model.safetensors";
    fs::copy(
        fixture(&format!("peft/{weights}")),
        folder.0.path().join(weights),
    )
    .unwrap();
    let path = folder.0.path();
    let load = format!("--load {}", path.display());
    let found = Families::transformers().adapters_at(path).unwrap().unwrap();
    let lora = |flags: &str| {
        resolve(&format!("{load} {flags}"))
            .unwrap()
            .recipe
            .lora
            .unwrap()
    };
    let loaded = lora("--set lora.dropout=0.5");
    let settings = |lora: &LoraConfig| {
        (
            lora.rank,
            lora.alpha,
            lora.rslora,
            lora.target_modules.clone(),
        )
    };
    assert_eq!((settings(&loaded), loaded.dropout), (settings(&found), 0.5));
    assert_ne!(settings(&found), settings(&LoraConfig::default()));
    let recipe = resolve(&load).unwrap().recipe;
    assert_eq!(recipe.lora, None, "adapters are merged without [lora]");
    let open = |flags: &str, saving: &str| {
        let recipe = resolve(&format!("{load} {flags}")).unwrap().recipe;
        let model = (&recipe.model, recipe.lora.as_ref());
        let families = Families::transformers();
        let opened = weights::open(path, model, &parse_text(saving).unwrap(), &families);
        opened.map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(open("--set lora.dropout=0.5", ""), Ok(()));
    for (set, says) in [
        ("lora.alpha=64", "lora.alpha is 64.0, not"),
        ("lora.rank=5", "lora.rank is 5, not"),
        ("lora.rslora=true", "lora.rslora is true, not false"),
    ] {
        let flags = format!("--set {set}");
        let error = open(&flags, "").unwrap_err();
        assert!(
            error.contains(says) && error.contains("--lenient settings"),
            "{error}"
        );
        assert_eq!(open(&flags, "--lenient settings"), Ok(()));
    }
}

#[test]
fn the_vocabulary_is_that_of_the_tokenizer() {
    let tokenizer = "/../burn-megatron-data/tests/fixtures/tokenizer/byte_bpe";
    let flags = format!("--tokenizer {}{tokenizer}", env!("CARGO_MANIFEST_DIR"));
    assert_eq!(recipe(&flags).model.vocabulary(), 400);
    let given = recipe(&format!("{flags} --set model.vocabulary=512"));
    assert_eq!(given.model.vocabulary(), 512);
}

#[test]
fn each_value_is_printed_with_its_origin() {
    let folder = Folder::new();
    let file = folder.write("my.toml", "[train]\nclip = 2.0\n");
    let flags = format!(
        "--recipe {file} --load {} --steps 50 --seed 3 --set train.optimizer.beta1=0.8 --data {file}",
        weights()
    );
    let LayeredRecipe {
        recipe, origins, ..
    } = resolve(&flags).unwrap();
    let text = toml::to_string(&recipe.complete()).unwrap();
    let text = origins.annotate(&text).unwrap();
    let again = folder.write("printed.toml", &text);
    assert_eq!(self::recipe(&format!("--recipe {again}")), recipe);
    for (key, origin) in [
        ("clip", file.clone()),
        ("steps", "flag".into()),
        ("seed", "flag".into()),
        ("beta1", "--set".into()),
        ("beta2", "default".into()),
        ("warmup_steps", "in proportion to steps".into()),
        ("hidden", format!("weights {}", weights())),
        ("path", "flag".into()),
        ("load", "flag".into()),
        ("prompt", "beginning of the held-out data".into()),
        ("micro_batch_size", "default".into()),
    ] {
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("{key} = ")));
        let line = line.unwrap_or_else(|| panic!("{key}: {text}"));
        assert!(line.ends_with(&format!("  # {origin}")), "{line}");
    }
}

#[test]
fn flags_of_tensor_parallel_overlap_fit_the_recipe() {
    let folder = Folder::new();
    let text = "[parallel]\ntensor = 2\nsequence_parallel = true\ntp_comm_overlap = 'bulk'\n\
                tp_comm_overlap_num_splits = 4";
    let bulk = folder.write("bulk.toml", text);
    let of = |flags: &str| {
        let parallel = recipe(&format!("--recipe {bulk} {flags}")).parallel;
        let method = parallel.tp_comm_overlap.map(|method| method.name());
        (method, parallel.tp_comm_overlap_num_splits)
    };
    assert_eq!(of(""), (Some("bulk"), Some(4)));
    assert_eq!(
        of("--parallel.tp_comm_overlap_num_splits 8"),
        (Some("bulk"), Some(8))
    );
    assert_eq!(of("--parallel.tp_comm_overlap ring"), (Some("ring"), None));
    assert_eq!(of("--parallel.tp_comm_overlap none"), (None, None));
    assert_eq!(of("--sp false"), (None, None));
    for (flags, wanted) in [
        (
            "--parallel.tp_comm_overlap_num_splits 3",
            "cannot make 3 equal chunks of the 64 tokens",
        ),
        (
            "--fp8 current",
            "tp_comm_overlap = bulk conflicts with FP8 layers",
        ),
        (
            "--parallel.tp_comm_overlap chain",
            "expected ring, bulk or none",
        ),
    ] {
        let found = error(&format!("--recipe {bulk} {flags}"));
        assert!(found.contains(wanted), "{flags}: {found}");
    }
    let found = error("--parallel.tp_comm_overlap ring");
    assert!(
        found.contains("tp_comm_overlap requires sequence parallelism"),
        "{found}"
    );
}

#[test]
fn weights_that_are_not_there_are_no_fault_of_the_recipe() {
    let folder = Folder::new();
    let file = folder.write("recipe.toml", "[train]\nsteps = 3\n");
    for flags in ["--load nowhere", "--set checkpoint.load='nowhere'"] {
        let error = error(&format!("--recipe {file} {flags}"));
        let says = "the weights at nowhere (checkpoint.load, --load): there is no model folder";
        assert!(error.starts_with(says), "{error}");
    }
}

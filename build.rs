//! Makes the C header from the entry points, and sets how the shared library is linked.
//!
//! The header goes to `OUT_DIR`; `scripts/header.sh` copies it to `include/`, and a test compares
//! the two.

use std::env;
use std::error::Error;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=src/entry");
    println!("cargo::rerun-if-changed=src/lib.rs");

    // Thread-local destructors, exit handlers and the process's signal handler point into the
    // library, so it stays once it is loaded.
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");

    let header = Path::new(&env::var("OUT_DIR")?).join("concertina.h");
    println!(
        "cargo::rustc-env=CONCERTINA_GENERATED_HEADER={}",
        header.display()
    );

    // What `src/lib.rs` declares as its modules is found from there.
    let header_text = cbindgen::Builder::new()
        .with_config(config())
        .with_src("src/lib.rs")
        .generate()?;
    header_text.write_to_file(header);
    Ok(())
}

fn config() -> cbindgen::Config {
    cbindgen::Config {
        language: cbindgen::Language::C,
        header: Some(
            "/* concertina: a CUDA memory allocator. Made from src/entry by scripts/header.sh. */"
                .into(),
        ),
        include_guard: Some("CONCERTINA_H".into()),
        cpp_compat: true,
        no_includes: true,
        sys_includes: ["stddef.h", "stdint.h"].map(String::from).into(),
        usize_is_size_t: true,
        documentation_style: cbindgen::DocumentationStyle::C,
        style: cbindgen::Style::Tag,
        line_length: 100,
        ..Default::default()
    }
}

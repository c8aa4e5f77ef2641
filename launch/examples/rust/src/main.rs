// Prints what a model generates, as it is generated. The module pb is made from proto/allspark.proto.
//
//   cargo build --release
//   target/release/allspark-stream --address HOST:PORT|unix:/PATH --model NAME [--max-new-tokens N] [--greedy] [--ca FILE]
//       [--token TOKEN] TEXT
//
// Ctrl-C cancels the call, and with it the request.
use std::error::Error;
use std::io::Write;
use std::time::Duration;

use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Uri};
use tonic::Request;

mod pb {
    tonic::include_proto!("allspark");
}

#[derive(Default)]
struct Options {
    address: String,
    model: String,
    max_new_tokens: i32,
    greedy: bool,
    ca: Option<String>,
    token: Option<String>,
    text: String,
}

fn options() -> Result<Options, Box<dyn Error>> {
    let mut found = Options {
        address: std::env::var("ALLSPARK_ADDRESS").unwrap_or_default(),
        max_new_tokens: 64,
        ..Default::default()
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        match word.as_str() {
            "--address" => found.address = value()?,
            "--model" => found.model = value()?,
            "--max-new-tokens" => found.max_new_tokens = value()?.parse()?,
            "--greedy" => found.greedy = true,
            "--ca" => found.ca = Some(value()?),
            "--token" => found.token = Some(value()?),
            _ if word.starts_with("--") => return Err(format!("{word} is not known").into()),
            _ => found.text = format!("{} {word}", found.text).trim_start().to_string(),
        }
    }
    Ok(found)
}

/// A channel to "host:port", or to "unix:/path".
async fn connect(address: &str, ca: Option<&str>) -> Result<Channel, Box<dyn Error>> {
    let kept_alive = |endpoint: Endpoint| {
        // A server that stops answering is noticed within 20 s.
        endpoint
            .http2_keep_alive_interval(Duration::from_secs(10))
            .keep_alive_timeout(Duration::from_secs(10))
    };
    if let Some(path) = address.strip_prefix("unix:") {
        let path = path.to_string();
        let connector = tower::service_fn(move |_: Uri| tokio::net::UnixStream::connect(path.clone()));
        // The URI is not used but for the name of the authority.
        let endpoint = kept_alive(Endpoint::from_static("http://localhost"));
        return Ok(endpoint.connect_with_connector(connector).await?);
    }
    let Some(file) = ca else {
        return Ok(kept_alive(Endpoint::try_from(format!("http://{address}"))?).connect().await?);
    };
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(std::fs::read(file)?));
    Ok(kept_alive(Endpoint::try_from(format!("https://{address}"))?).tls_config(tls)?.connect().await?)
}

async fn stream(options: Options) -> Result<(), Box<dyn Error>> {
    let channel = connect(&options.address, options.ca.as_deref()).await?;
    let mut client = pb::allspark_client::AllsparkClient::new(channel);
    let mut request = Request::new(pb::GenerateRequest {
        model: options.model,
        prompt: Some(pb::generate_request::Prompt::Text(options.text)),
        config: Some(pb::GenerateConfig {
            max_new_tokens: Some(options.max_new_tokens),
            do_sample: Some(!options.greedy),
            ..Default::default()
        }),
        ..Default::default()
    });
    if let Some(token) = options.token {
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse()?);
    }
    let mut answers = client.generate(request).await?.into_inner();
    while let Some(answer) = answers.message().await? {
        for elements in &answer.elements {
            print!("{}", elements.text);
        }
        std::io::stdout().flush()?;
        if let Some(error) = answer.error {
            return Err(error.message.into()); // it failed after it had begun
        }
        if !answer.finish_reason.is_empty() {
            eprintln!("\n{}", answer.finish_reason);
        }
    }
    Ok(())
}

/// What a refused call says; of other errors, the texts of the error and of its causes.
fn message(error: &(dyn Error + 'static)) -> String {
    if let Some(status) = error.downcast_ref::<tonic::Status>() {
        return status.message().to_string();
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(found) = cause {
        text += &format!(": {found}");
        cause = found.source();
    }
    text
}

#[tokio::main]
async fn main() {
    let done = match options() {
        Ok(found) => tokio::select! {
            done = stream(found) => done,
            _ = tokio::signal::ctrl_c() => Ok(()),
        },
        Err(error) => Err(error),
    };
    if let Err(error) = done {
        eprintln!("{}", message(error.as_ref()));
        std::process::exit(1);
    }
}

#include "pool.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

namespace allspark::client::internal {

namespace {

// Pause after a failed attempt in the background, s.
constexpr double kReconnectPauseSeconds = 0.5;

bool is_unix(const std::string& address) { return address.rfind("unix:", 0) == 0; }

std::string read_file(const std::string& path) {
  if (path.empty()) return "";
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file.is_open() || file.bad())
    throw AllSparkError(AsStatus::ALLSPARK_IO_ERROR, "the TLS file " + path + " cannot be read");
  return text.str();
}

std::shared_ptr<grpc::Channel> make_channel(const std::string& address, const std::optional<TlsConfig>& tls) {
  grpc::ChannelArguments options;
  // As allspark_client/connection.py: a server that stops answering is noticed within 20 s.
  options.SetInt("grpc.keepalive_time_ms", 10'000);
  options.SetInt("grpc.keepalive_timeout_ms", 10'000);
  options.SetInt("grpc.http2.ping_timeout_ms", 10'000);
  options.SetInt("grpc.keepalive_permit_without_calls", 1);
  options.SetInt("grpc.http2.max_pings_without_data", 0);
  options.SetInt("grpc.initial_reconnect_backoff_ms", 100);
  options.SetInt("grpc.min_reconnect_backoff_ms", 5'000);  // despite its name: the time limit of one attempt
  options.SetInt("grpc.max_reconnect_backoff_ms", 1'000);
  options.SetInt("grpc.enable_retries", 0);
  options.SetInt("grpc.enable_http_proxy", 0);
  options.SetInt("grpc.use_local_subchannel_pool", 1);  // engines do not share connections
  options.SetInt("grpc.max_metadata_size", 64 << 10);
  options.SetInt("grpc.absolute_max_metadata_size", 128 << 10);
  options.SetMaxSendMessageSize(-1);
  options.SetMaxReceiveMessageSize(-1);
  if (is_unix(address)) options.SetString("grpc.default_authority", "localhost");
  if (!tls || is_unix(address)) return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), options);
  if (tls->cert.empty() != tls->key.empty())
    throw std::invalid_argument("tls: a client certificate needs both cert and key");
  if (!tls->server_name.empty()) options.SetSslTargetNameOverride(tls->server_name);
  grpc::SslCredentialsOptions files;
  files.pem_root_certs = read_file(tls->ca);
  files.pem_private_key = read_file(tls->key);
  files.pem_cert_chain = read_file(tls->cert);
  return grpc::CreateCustomChannel(address, grpc::SslCredentials(files), options);
}

}  // namespace

// --- Background ---

void Background::run(std::function<void()> task) {
  std::lock_guard lock(mutex_);
  if (closing_) return;
  tasks_.remove_if(
      [](std::future<void>& each) { return each.wait_for(std::chrono::seconds(0)) == std::future_status::ready; });
  tasks_.push_back(std::async(std::launch::async, std::move(task)));
}

bool Background::pause(double duration) {
  std::unique_lock lock(mutex_);
  return closing_changed_.wait_for(lock, seconds(duration), [this] { return closing_; });
}

bool Background::closing() const {
  std::lock_guard lock(mutex_);
  return closing_;
}

void Background::begin_closing() {
  std::lock_guard lock(mutex_);
  closing_ = true;
  closing_changed_.notify_all();
}

void Background::join() {
  std::list<std::future<void>> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (auto& task : tasks) task.wait();
}

// --- addresses and tokens ---

std::string check_address(const std::string& address) {
  const char* blanks = " \t\r\n";
  const size_t begin = address.find_first_not_of(blanks);
  const std::string text =
      begin == std::string::npos ? "" : address.substr(begin, address.find_last_not_of(blanks) + 1 - begin);
  if (is_unix(text) && text.size() > 5) return text;
  const size_t colon = text.rfind(':');
  const std::string port = colon == std::string::npos ? "" : text.substr(colon + 1);
  const bool digits = !port.empty() && port.size() <= 5 && port.find_first_not_of("0123456789") == std::string::npos;
  if (colon == 0 || !digits || std::stoi(port) < 1 || std::stoi(port) > 65535)
    throw std::invalid_argument("address='" + text + "' is not known; allowed: 'host:port' or 'unix:/path'");
  return text;
}

std::string environment_token() {
  const char* path = std::getenv("ALLSPARK_TOKEN_FILE");
  if (path == nullptr || *path == '\0') return "";
  std::ifstream file(path);
  if (!file)
    throw AllSparkError(AsStatus::ALLSPARK_IO_ERROR, "$ALLSPARK_TOKEN_FILE cannot be read: " + std::string(path));
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string first, second;
    if (!(words >> first) || first[0] == '#') continue;
    return words >> second ? second : first;  // limits may follow the token
  }
  throw std::invalid_argument("$ALLSPARK_TOKEN_FILE: " + std::string(path) + " holds no token");
}

// --- Member ---

Member::Member(const std::string& given, const std::optional<TlsConfig>& tls, std::string token,
               Session::OnLost on_lost, Background* background)
    : address(check_address(given)),
      token_(std::move(token)),
      on_lost_(std::move(on_lost)),
      background_(background),
      stub_(pb::Allspark::NewStub(make_channel(address, tls))) {}

std::shared_ptr<Session> Member::live_session() const {
  std::lock_guard lock(mutex_);
  return session_ && greeted_ && !session_->broken() ? session_ : nullptr;
}

std::shared_ptr<Session> Member::session(double timeout) {
  if (auto live = live_session()) return live;
  std::unique_lock connecting(connecting_, std::defer_lock);
  if (!connecting.try_lock_for(seconds(timeout)))  // another thread is connecting, with a timeout of its own
    throw Unavailable(address, "no answer within " + std::to_string(timeout) + " s");
  if (auto live = live_session()) return live;
  std::shared_ptr<Session> old, opened;
  {
    std::lock_guard lock(mutex_);
    if (closed_) throw Unavailable(address, "the client is closed");
    opened = std::make_shared<Session>(address, stub_.get(), token_, on_lost_);
    old = std::exchange(session_, opened);
    greeted_ = false;
  }
  if (old) {
    old->close();
    old->join();
  }
  opened->greet(timeout);
  std::lock_guard lock(mutex_);
  greeted_ = true;
  return opened;
}

void Member::reconnect_soon() {
  {
    std::lock_guard lock(mutex_);
    if (reconnecting_ || closed_ || (session_ && greeted_ && !session_->broken())) return;
    reconnecting_ = true;
  }
  background_->run([this] {
    try {
      session();
    } catch (const std::exception&) { background_->pause(kReconnectPauseSeconds); }
    std::lock_guard lock(mutex_);
    reconnecting_ = false;
  });
}

void Member::run_call(double timeout, const std::function<grpc::Status(grpc::ClientContext*)>& body) {
  grpc::ClientContext context;
  if (!token_.empty()) context.AddMetadata("authorization", "Bearer " + token_);
  if (timeout > 0)
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::duration_cast<std::chrono::system_clock::duration>(seconds(timeout)));
  {
    std::lock_guard lock(mutex_);
    if (closed_) throw Unavailable(address, "the client is closed");
    calls_.insert(&context);
  }
  const grpc::Status status = body(&context);
  {
    std::lock_guard lock(mutex_);
    calls_.erase(&context);
  }
  if (!status.ok()) std::rethrow_exception(translate(status, context, address));
}

void Member::load_model(const std::string& name) {
  pb::ModelRequest question;
  question.set_model(name);
  run_call(0, [&](grpc::ClientContext* context) {
    auto reader = stub_->LoadModel(context, question);
    pb::LoadProgress progress;
    while (reader->Read(&progress)) {}
    return reader->Finish();
  });
  std::lock_guard lock(mutex_);
  models_time_.reset();
}

std::vector<ModelState> Member::models(double max_age) {
  {
    std::lock_guard lock(mutex_);
    if (models_time_ && Clock::now() - *models_time_ <= seconds(max_age)) return models_;
  }
  const auto info = call(&pb::Allspark::Stub::GetServerInfo, pb::ServerInfoRequest(), kAttemptSeconds);
  std::lock_guard lock(mutex_);
  models_.clear();
  for (const auto& model : info.models()) models_.push_back(model_from_pb(model));
  models_time_ = Clock::now();
  draining_ = info.draining();
  sent_work_ = 0;
  return models_;
}

bool Member::draining() const {
  std::lock_guard lock(mutex_);
  return draining_;
}

int64_t Member::sent_work() const {
  std::lock_guard lock(mutex_);
  return sent_work_;
}

int64_t Member::last_request() const {
  std::lock_guard lock(mutex_);
  return last_request_;
}

void Member::note_sent(int64_t tokens, int64_t request) {
  std::lock_guard lock(mutex_);
  sent_work_ += tokens;
  last_request_ = request;
}

void Member::close() {
  std::shared_ptr<Session> session;
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
    for (grpc::ClientContext* context : calls_) context->TryCancel();
    session = session_;
  }
  if (session) session->close();
}

void Member::join() {
  std::shared_ptr<Session> session;
  {
    std::lock_guard lock(mutex_);
    session = session_;
  }
  if (session) session->join();
}

}  // namespace allspark::client::internal
